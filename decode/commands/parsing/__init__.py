"""From the command line and YAML files to settings, and from errors to an exit status."""
