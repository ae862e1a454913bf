"""Which instruction sets are found, how one is forced, and that code for one holds no instruction of another."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys

import numpy as np
import pytest

from ranvier.codegen.launch import At, Code, KernelSpec, Launch
from ranvier.codegen.llvm import compiler, isa
from ranvier.codegen.llvm.builder import Module, Val, vector
from ranvier.codegen.llvm.isa import Isa
from ranvier.codegen.llvm.library import source
from ranvier.codegen.storage import Storage
from ranvier.devices import cpu_features
from ranvier.devices.surroundings import Surroundings
from ranvier.errors import InvalidConfig, NotSupported
from tests.codegen import emulated
from tests.codegen.harness import ISAS

X86 = [i for i in isa.TABLE if i.triple == "x86_64"]


def emit_axpy(module: Module, symbol: str, target: Isa) -> None:
    """y = max(a*x + y, 0), by vectors and a masked tail."""
    fn = module.function(symbol, [("ptr", "x"), ("ptr", "y"), ("i64", "n"), ("float", "a")])
    lanes = target.lanes(4)
    kind = vector("float", lanes)
    n = fn.args["n"]
    whole = fn.mul(fn.div(n, lanes), lanes)

    def result(x, y):
        return fn.max_(fn.fma(fn.splat(fn.args["a"], lanes), x, y), 0.0)

    with fn.loop(0, whole, lanes) as at:
        x, y = fn.gep(fn.args["x"], at, "float"), fn.gep(fn.args["y"], at, "float")
        fn.store(result(fn.load(kind, x), fn.load(kind, y)), y)
    with fn.if_(fn.cmp("slt", whole, n)):
        x, y = fn.gep(fn.args["x"], whole, "float"), fn.gep(fn.args["y"], whole, "float")
        mask = fn.mask_below(lanes, fn.sub(n, whole))
        fn.masked_store(result(fn.masked_load(kind, x, mask), fn.masked_load(kind, y, mask)), y, mask)
    fn.ret()


AXPY = KernelSpec("axpy", ("test", "axpy"), emit_axpy)


def test_the_machine_has_a_best_one():
    here = isa.available()
    assert here and here[-1].name == "portable"
    assert [i.score for i in here] == sorted((i.score for i in here), reverse=True)
    assert isa.chosen("") == here[0]


def test_features_are_those_llvm_finds():
    import llvmlite.binding as llvm

    found, expected = isa.host_features(), llvm.get_host_cpu_features()
    names = {name for i in isa.TABLE if i.triple == isa.architecture() for name in i.needs}
    names |= {name for i in here_names() for name in isa.OPTIONAL.get(i, ())}
    if isa.architecture() == "aarch64":  # where it looks for some of them only, and names those it looked for
        names &= expected.keys()
    assert {n for n in names if found.get(n)} == {n for n in names if expected.get(n)}


def here_names() -> set[str]:
    return {i.name for i in isa.TABLE if i.triple == isa.architecture()}


def test_features_of_an_arm_machine(tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd asimdhp asimddp sve i8mm bf16\n"
    )
    found = cpu_features(Surroundings(root=tmp_path))
    assert {"neon", "fullfp16", "dotprod", "sve", "i8mm", "bf16"} <= found
    monkeypatch.setattr(isa, "architecture", lambda: "aarch64")
    monkeypatch.setattr(isa, "host_features", lambda: dict.fromkeys(found, True))
    best = isa.available()[0]
    assert best.name == "neon" and best.extensions == {"fullfp16", "dotprod", "sve", "i8mm", "bf16"}
    assert "+i8mm" in best.features and best.has("sve")


def test_an_older_machine_gets_less(monkeypatch):
    monkeypatch.setattr(isa, "architecture", lambda: "x86_64")
    v3 = {"avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe"}
    monkeypatch.setattr(isa, "host_features", lambda: dict.fromkeys(v3, True))
    assert [i.name for i in isa.available()] == ["avx2", "portable"]
    monkeypatch.setattr(isa, "host_features", lambda: dict.fromkeys(v3 - {"fma"}, True))
    assert [i.name for i in isa.available()] == ["portable"]


def test_an_unknown_architecture_raises(monkeypatch):
    monkeypatch.setattr(isa, "architecture", lambda: "vax")
    with pytest.raises(NotSupported, match="vax"):
        isa.chosen.__wrapped__("")


def test_forced(monkeypatch):
    monkeypatch.setenv(isa.VARIABLE, "portable")
    assert isa.host().name == "portable"
    monkeypatch.setenv(isa.VARIABLE, "portabel")
    with pytest.raises(InvalidConfig, match="did you mean 'portable'"):
        isa.host()
    other = "neon" if isa.architecture() == "x86_64" else "avx2"
    monkeypatch.setenv(isa.VARIABLE, other)
    with pytest.raises(InvalidConfig, match=f"no {other}"):
        isa.host()


def test_keys_differ():
    keys = [i.key for i in isa.available()]
    assert len(set(keys)) == len(keys)
    assert isa.named("neon", "aarch64").key == "neon"


@pytest.mark.parametrize("target", X86, ids=lambda i: i.name)
def test_no_foreign_instructions(target):
    text = compiler.assembly(source(AXPY, target), target)
    has = {name: bool(re.search(pattern, text)) for name, pattern in _TRACES.items()}
    assert has == {
        "512-bit registers": target.name == "avx512",
        "256-bit registers": target.name == "avx2",
        "fused": target.fma,
        "mask registers": target.masks,
        "three operands": target.name != "portable",
    }


_TRACES = {
    "512-bit registers": r"%zmm",
    "256-bit registers": r"%ymm",
    "fused": r"\bvfmadd",
    "mask registers": r"\{%k[1-7]\}",
    "three operands": r"\bv(max|min|cmp)[a-z]*[sp]s\b",
}


@pytest.mark.parametrize("target", ISAS, ids=lambda i: i.key)
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_each_runs(target, extra):
    from ranvier.codegen.llvm.library import kernels

    n = 3 * target.lanes(4) + extra
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((2, n), np.float32)
    made = kernels([AXPY], target)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float)
    got = np.full(n + 16, 7, np.float32)
    got[:n] = y
    call(made[AXPY].address)(x.ctypes.data, got.ctypes.data, n, 1.5)
    expected = np.maximum(1.5 * x.astype(np.float64) + y, 0)
    np.testing.assert_allclose(got[:n], expected, rtol=1e-6, atol=1e-6)
    assert (got[n:] == 7).all()


def test_neon_is_emitted():
    target = isa.named("neon", "aarch64")
    text = compiler.assembly(source(AXPY, target), target)
    assert re.search(r"\bfmla\s+v\d+\.4s", text) and "xmm" not in text
    plain = compiler.compile_object(source(AXPY, target), target)
    assert plain[:4] == b"\x7fELF" and int.from_bytes(plain[18:20], "little") == 183  # EM_AARCH64


def emit_tiles(module: Module, symbol: str, target: Isa) -> None:
    """out[i] = table[i % 4] * f(x[i]) for tiles of ``dims[0]`` elements, f called through a pointer."""
    params = [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")]
    fn = module.function(symbol, params)
    x, out, helper = (fn.load("ptr", fn.gep(fn.args["bufs"], 8 * k)) for k in range(3))
    table = Val(fn, "ptr", module.table(f"{symbol}_table", "float", [1.0, 2.0, 3.0, 4.0]))
    size = fn.load("i64", fn.args["dims"])
    with fn.loop(fn.args["begin"] * size, fn.args["end"] * size) as i:
        value = fn.call_pointer(helper, "float", [fn.load("float", fn.gep(x, i, "float"))])
        weight = fn.load("float", fn.gep(table, fn.and_(i, 3), "float"))
        fn.store(fn.mul(value, weight), fn.gep(out, i, "float"))
    fn.ret()


def emit_square_plus_one(module: Module, symbol: str, target: Isa) -> None:
    fn = module.function(symbol, [("float", "x")], "float")
    fn.ret(fn.fma(fn.args["x"], fn.args["x"], 1.0))


def emit_vector_axpy(module: Module, symbol: str, target: Isa) -> None:
    """AXPY as a launch: everything in one tile."""
    emit_axpy(module, f"{symbol}_axpy", target)
    params = [("ptr", "bufs"), ("ptr", "dims"), ("i64", "begin"), ("i64", "end"), ("ptr", "scratch")]
    fn = module.function(symbol, params)
    x, y = (fn.load("ptr", fn.gep(fn.args["bufs"], 8 * k)) for k in range(2))
    fn.call(f"{symbol}_axpy", "void", [x, y, fn.load("i64", fn.args["dims"]), fn.const("float", 1.5)])
    fn.ret()


@emulated.needed
@pytest.mark.parametrize("n", [1, 4, 37])
def test_neon_runs_as_a_program_of_its_own(n):
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((2, n), np.float32)
    first, second, third = (Storage("input", 4 * n) for _ in range(3))
    axpy = KernelSpec("axpy", ("test", "axpy launch"), emit_vector_axpy)
    tiles = KernelSpec("tiles", ("test", "tiles"), emit_tiles)
    helper = KernelSpec("helper", ("test", "square plus one"), emit_square_plus_one)
    launches = [
        Launch(axpy, (At(first), At(second)), (n,), 1, (second,)),
        Launch(tiles, (At(second), At(third), Code(helper)), (1,), n, (third,)),
    ]
    out = np.full(n, np.nan, np.float32)
    got = y.copy()
    emulated.run(launches, {first: x, second: got, third: out}, split=3)
    expected = np.maximum(1.5 * x.astype(np.float64) + y, 0)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, (expected**2 + 1) * (1 + np.arange(n) % 4), rtol=1e-5)


def test_looking_loads_no_llvm():
    if sys.platform != "linux":
        pytest.skip("LLVM is asked there")
    program = "import sys; from ranvier.codegen.llvm import isa; isa.host(); print('llvmlite.binding' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_short_vectors_work_abreast_where_registers_allow() -> None:
    """A cache line of them; with few registers what they hold would go to memory and back."""
    found = {(i.name, i.triple): i.abreast for i in isa.TABLE}
    assert found["avx512", "x86_64"] == found["avx2", "x86_64"] == found["portable", "x86_64"] == 1
    assert found["neon", "aarch64"] == found["portable", "aarch64"] == 4
