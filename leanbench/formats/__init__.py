"""Other people's formats of a decode attention problem, read and written without their packages."""
