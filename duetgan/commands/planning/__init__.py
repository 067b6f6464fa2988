"""Planning of the quickstart: survey the images, measure the machine, choose the settings."""
