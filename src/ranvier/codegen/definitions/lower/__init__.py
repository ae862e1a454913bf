"""Lowerings that are loops and nothing else, by family of operators: importing a module declares what is in it."""
