"""The lab: the paper's experiments, and how they are run, measured and shown."""
