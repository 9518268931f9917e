"""Process groups and symmetric memory behind one interface."""
