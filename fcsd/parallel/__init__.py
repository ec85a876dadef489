"""When and how a model communicates: the function of ``models/``, computed by several ranks together."""
