"""Lowerings by family of operators: importing a module here declares what is in it."""
