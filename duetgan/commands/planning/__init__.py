"""Plan the quickstart and run the plan: survey images, measure speeds, choose settings."""
