"""vLLM: a 2-bit cache with exact dense windows in a stock vLLM, chosen by ``--attention-backend CUSTOM``.

=============  ==========================================================================================
plugin         what vLLM calls in each of its processes; registers, and changes nothing else
compat         which features this vLLM has
settings       what the user gave in ``--additional-config``
refusals       options that the cache cannot serve, each with its reason
plan           settings, artifact and sizes of the model that this process runs
backend        the attention backend, its metadata and their builder
impl           one attention layer: stores to both tiers, reads from both
dense          the companion layer that owns the dense tier, its cache spec and its block manager
report         the line about memory at start
specs          specs of sliding-window layers beside packed ones; packed layers of vLLM 0.26 and 0.27
=============  ==========================================================================================
"""
