"""Nests as kernels that can be launched.

::

    printed = kernel(nest)              # printed and scheduled; nothing is compiled yet, torch is not needed
    printed.source                      # Triton text of all its kernels, for people
    printed.temporaries                 # storages besides the nest's own that must have memory too (often none)
    printed.launch(memory)              # on torch's current stream and device
    run = printed.bound(memory)         # the same with addresses looked up once: a callable without arguments

``memory`` maps every :class:`Storage` the nest names, and every temporary, to a torch tensor whose first byte is the
storage's first byte, of any dtype and shape (a view into an arena will do). A nest with nothing to do has no calls, and
launching it does nothing. One nest may become several calls (few huge rows are folded in parts): ``printed.calls``
are run in order on one stream. Memory may overlap only as it may for the CPU's kernels: elementwise in place.

Kernels are specialised by structure; sizes and strides are passed when they are launched. Triton makes further
variants by the alignment of addresses and by which numbers are multiples of 16. A compiled variant is found again by
those, so a second launch costs a few microseconds of Python.
"""
