"""Foreign formats of decode attention problems, without their packages."""
