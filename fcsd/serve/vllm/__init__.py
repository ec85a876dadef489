"""The vLLM plugin: vLLM's own models, rewired, with reductions that travel while the model computes.

``plugin.py`` is the entry point. Nothing else here is imported outside of vLLM's processes but ``support.py``, which
says whether vLLM can serve a converted model.
"""
