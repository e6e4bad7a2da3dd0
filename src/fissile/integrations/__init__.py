"""fissile inside other libraries; each module here needs one that the core does not."""
