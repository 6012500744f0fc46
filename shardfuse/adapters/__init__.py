"""Ways into other trainers and model libraries, each through the extension point that the host has.

Nothing here is imported by shardfuse itself, and nothing is replaced before it is asked for.  Each adapter says in the
log ``shardfuse.adapters`` what it put in place of what.

- ``torchtitan_norms``: overrides of torchtitan's RMSNorm and LayerNorm, named in ``--override.imports``.
- ``hub_layers``: layers for the library ``kernels`` of the Hugging Face hub, which transformers maps to its own.
- ``megatron_norms``: the norms of a spec provider of Megatron Core.
"""
