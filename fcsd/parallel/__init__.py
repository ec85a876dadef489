"""When and how it is communicated: the same function as ``models/``, spread over ranks."""
