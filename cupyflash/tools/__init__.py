"""What stands on the library and is asked for by name: explain, tune, compile, and the command line."""
