"""What operators mean in loops: definitions, how they are grouped, and the lowerings that every device shares."""
