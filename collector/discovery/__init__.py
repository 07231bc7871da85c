"""Which exporters there are: sources that name them, watched while the collector runs."""
