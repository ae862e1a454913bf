"""An operator and an execution provider for Ranvier. Nothing is imported here: entry points name the modules."""
