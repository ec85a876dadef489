"""What is computed: the wiring, one row of data per architecture, the classes built from both."""
