"""Devices in another process: how messages look (``wire``), travel (``channel``) and are answered (``link``), and the
provider, its tensors and kernels over all of that (``client``). What stands at the other end is ``runtime/worker``.

The providers ``sim`` and ``remote`` are this with different channels.
"""
