"""The other end of providers that run elsewhere: ``device`` answers messages, ``pipe`` and ``network`` carry them,
``simulation`` makes an ordinary process behave like an accelerator with limits and faults."""
