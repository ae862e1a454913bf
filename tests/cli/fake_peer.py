"""Runtimes for the tests of ``ranvier bench``: each uses ours and bends something."""

from __future__ import annotations

import os
import time

from ranvier.cli.peers import RanvierRunner


class Agreeing(RanvierRunner):
    version = "1.0"


class Wrong(Agreeing):
    def run(self, inputs):
        print("a library that talks")
        return {name: value + 1 for name, value in super().run(inputs).items()}


class Refusing(Agreeing):
    def __init__(self, model, threads, options, shapes):
        raise ValueError("this model is beyond me")


class Sleeping(Agreeing):
    def run(self, inputs):
        time.sleep(60)


class FailingLater(Agreeing):
    """Works twice, as loading needs it to, and never again."""

    calls = 0

    def run(self, inputs):
        self.calls += 1
        if self.calls > 2:
            raise ValueError("enough is enough")
        return super().run(inputs)


class WrongLater(Agreeing):
    """Right at first, wrong once it is warm."""

    calls = 0

    def run(self, inputs):
        self.calls += 1
        return {name: value + (self.calls > 2) for name, value in super().run(inputs).items()}


class Dying(Agreeing):
    def run(self, inputs):
        os._exit(7)
