"""Mutation testing: change one small thing in the product and see whether a test notices.

`make mutants N=100 SEED=1 ONLY=training` samples mutants, runs for each the tests that execute the changed line, and
prints a table by folder with the mutants that survived. docs/measurements/faults.md has the scores.
"""
