"""``fcsd bench serve``: how fast a converted model would be served on this machine, before anything is healed."""
