"""Writing and loading checkpoints: values, placement, atomicity, and the sentence for everything that is not one."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from herald_jax.checkpoint import CheckpointWriter, LeafSource, load_checkpoint, read_manifest, save_checkpoint
from herald_jax.errors import CheckpointError, ConfigError
from herald_jax.model import ParamSpec, flatten, param_specs, unflatten
from tests import tiny

CONFIG = tiny.config()
ROOT = Path(__file__).parents[2]


def params(dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    specs = param_specs(dataclasses.replace(CONFIG, dtype=dtype))
    return {path: draw.normal(0, 1, spec.shape).astype(spec.dtype) for path, spec in specs.items()}


def leftovers(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", CONFIG, unflatten(params()))
    return tmp_path / "model"


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_round_trip_is_exact(tmp_path: Path, stored: str) -> None:
    config = dataclasses.replace(CONFIG, dtype=stored)
    written = params(stored)
    save_checkpoint(tmp_path / "model", config, unflatten(written), provenance={"notes": ["made by hand"]})
    loaded = load_checkpoint(tmp_path / "model")
    assert loaded.config == config
    assert loaded.provenance["notes"] == ["made by hand"]
    assert loaded.tokenizer_dir is None
    for path, leaf in flatten(loaded.params).items():
        assert leaf.dtype == written[path].dtype, path
        np.testing.assert_array_equal(np.asarray(leaf), written[path], err_msg=path)
    assert flatten(loaded.params).keys() == written.keys()


def test_dtype_is_cast_on_the_way_in(saved: Path) -> None:
    loaded = load_checkpoint(saved, dtype="bfloat16")
    assert loaded.config.dtype == "bfloat16"
    for path, leaf in flatten(loaded.params).items():
        np.testing.assert_array_equal(np.asarray(leaf), params()[path].astype(ml_dtypes.bfloat16), err_msg=path)
    with pytest.raises(ConfigError, match="dtype is 'int8', but must be one of bfloat16, float16, float32"):
        load_checkpoint(saved, dtype="int8")


def test_leaves_go_straight_to_their_shards(saved: Path) -> None:
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])

    def sharding_for(path: str, spec: ParamSpec) -> jax.sharding.Sharding:
        axes = ["model" if axis in ("kv_heads", "mlp", "vocab") else None for axis in spec.axes]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    leaves = flatten(load_checkpoint(saved, sharding_for=sharding_for).params)
    kernel = leaves["layers/0/attn/qkv/kernel"]
    assert [shard.data.shape for shard in kernel.addressable_shards] == [(32, 1, 4, 16), (32, 1, 4, 16)]
    for path, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(leaf), params()[path], err_msg=path)


def test_plain_orbax_reads_it(saved: Path) -> None:
    """The documented way in, without a line of ours."""
    restored = ocp.PyTreeCheckpointer().restore(saved / "params")
    np.testing.assert_array_equal(restored["embed"]["embedding"], params()["embed/embedding"])
    assert flatten(restored).keys() == params().keys()


def test_a_zero_leaf_is_stored(tmp_path: Path) -> None:
    """Chunks of zeros are written like others, so that a lost file is noticed."""
    written = params()
    written["head/kernel"][:] = 0
    save_checkpoint(tmp_path / "model", CONFIG, unflatten(written))
    assert (tmp_path / "model/params/head.kernel/0.0").stat().st_size == written["head/kernel"].nbytes


def test_slabs_of_several_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("herald_jax.checkpoint.CHUNK_BYTES", 5000)
    save_checkpoint(tmp_path / "model", CONFIG, unflatten(params()))
    chunks = sorted(f.name for f in (tmp_path / "model/params/embed.embedding").iterdir())
    assert chunks == [".zarray", "0.0", "1.0", "2.0", "3.0", "4.0", "5.0", "6.0"]
    loaded = flatten(load_checkpoint(tmp_path / "model").params)
    for path, leaf in params().items():
        np.testing.assert_array_equal(np.asarray(loaded[path]), leaf, err_msg=path)


def test_tokenizer_files_travel(tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "model")
    loaded = load_checkpoint(path)
    assert loaded.tokenizer_dir == path / "tokenizer"
    assert leftovers(path / "tokenizer") == ["tokenizer.json", "tokenizer_config.json"]


# -- atomicity ---------------------------------------------------------------------------------------------------------


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    leaves = {path: LeafSource.from_array(leaf) for path, leaf in params().items()}

    def read(rows: int) -> Iterator[np.ndarray]:
        raise RuntimeError("source went away")
        yield

    leaves["norm/scale"] = dataclasses.replace(leaves["norm/scale"], read=read)
    with pytest.raises(RuntimeError, match="source went away"), CheckpointWriter(tmp_path / "model") as writer:
        writer.write_params(leaves)
    assert leftovers(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    leaves = {path: LeafSource.from_array(leaf) for path, leaf in params().items()}

    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / "model") as writer:
        writer.write_params(leaves, on_leaf=interrupt)
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_reported_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the real file system: TensorStore meets ENOSPC on a file system of one megabyte."""
    disk = small_disk(tmp_path)
    try:
        with pytest.raises(OSError, match="No space left on device") as caught:
            save_checkpoint(disk / "model", CONFIG, unflatten(params()))
        assert caught.value.errno == errno.ENOSPC
        assert leftovers(disk) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def small_disk(tmp_path: Path) -> Path:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs the right to mount a tmpfs ({mounted.stderr.strip()})")
    return disk


def test_enospc_in_any_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to mount: the manifest's write fails."""

    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_checkpoint(tmp_path / "model", CONFIG, unflatten(params()))
    assert leftovers(tmp_path) == []


KILLED = """
    import os, signal, sys
    from herald_jax.checkpoint import CheckpointWriter, LeafSource
    from tests.herald_jax.test_checkpoint import CONFIG, params

    leaves = {path: LeafSource.from_array(leaf) for path, leaf in params().items()}
    seen = []

    def on_leaf(path):
        seen.append(path)
        if len(seen) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    with CheckpointWriter(sys.argv[1]) as writer:
        writer.write_params(leaves, on_leaf=on_leaf)
"""


def test_kill_9_leaves_nothing_that_looks_complete_and_rerunning_works(tmp_path: Path) -> None:
    target = tmp_path / "model"
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(target)], check=False, timeout=120, cwd=ROOT
    )
    assert child.returncode == -9
    (remains,) = leftovers(tmp_path)
    assert remains.startswith(".model.partial-")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_checkpoint(target)
    with pytest.raises(CheckpointError, match="is an incomplete checkpoint"):
        load_checkpoint(tmp_path / remains)
    save_checkpoint(target, CONFIG, unflatten(params()))
    assert leftovers(tmp_path) == ["model"]
    load_checkpoint(target)


def test_leftovers_are_told_from_other_things(tmp_path: Path) -> None:
    """Names with glob characters, and a destination whose own work looks like ours."""
    target = tmp_path / "model[1]"
    (tmp_path / ".model[1].partial-deadbeef").mkdir()
    (tmp_path / ".model[1].partial-x.partial-deadbeef").mkdir()
    (tmp_path / ".model1.partial-deadbeef").mkdir()
    save_checkpoint(target, CONFIG, unflatten(params()))
    assert leftovers(tmp_path) == [".model1.partial-deadbeef", ".model[1].partial-x.partial-deadbeef", "model[1]"]


def test_a_running_conversion_is_not_disturbed(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "model"):
        with pytest.raises(CheckpointError, match="another conversion is writing"):
            save_checkpoint(tmp_path / "model", CONFIG, unflatten(params()))
        assert len(leftovers(tmp_path)) == 1
    assert leftovers(tmp_path) == []


def test_force_replaces_only_once_the_new_one_is_complete(saved: Path) -> None:
    other = unflatten(params(seed=1))
    with pytest.raises(CheckpointError, match="already holds a checkpoint; give another"):
        save_checkpoint(saved, CONFIG, other)
    broken = {path: leaf for path, leaf in params(seed=1).items() if path != "norm/scale"}
    with pytest.raises(CheckpointError, match="parameters do not fit"):
        save_checkpoint(saved, CONFIG, unflatten(broken), force=True)
    old = load_checkpoint(saved).params["norm"]["scale"]
    np.testing.assert_array_equal(np.asarray(old), params()["norm/scale"])
    save_checkpoint(saved, CONFIG, other, force=True)
    new = load_checkpoint(saved).params["norm"]["scale"]
    np.testing.assert_array_equal(np.asarray(new), params(seed=1)["norm/scale"])
    assert leftovers(saved.parent) == ["model"]


def test_a_replacement_that_died_between_its_renames_is_undone(saved: Path) -> None:
    aside = saved.parent / ".model.partial-abcdefgh"
    aside.mkdir()
    saved.rename(aside / "replaced")
    with pytest.raises(CheckpointError, match="already holds a checkpoint"), CheckpointWriter(saved) as writer:
        writer.write_params({})
    np.testing.assert_array_equal(np.asarray(load_checkpoint(saved).params["norm"]["scale"]), params()["norm/scale"])


def test_nothing_but_a_checkpoint_is_ever_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "thesis"
    precious.mkdir()
    save_checkpoint(precious, CONFIG, unflatten(params()))  # an empty directory is a fine destination
    shutil.rmtree(precious)
    precious.mkdir()
    (precious / "chapter1.tex").write_text("...")
    with pytest.raises(CheckpointError, match="is not empty and not a herald_jax checkpoint"):
        save_checkpoint(precious, CONFIG, unflatten(params()), force=True)
    with pytest.raises(CheckpointError, match=r"chapter1\.tex exists and is not a directory"):
        save_checkpoint(precious / "chapter1.tex", CONFIG, unflatten(params()), force=True)
    assert leftovers(precious) == ["chapter1.tex"]


# -- what is not a checkpoint ------------------------------------------------------------------------------------------


def test_not_checkpoints(tmp_path: Path) -> None:
    for path, sentence in [
        (tmp_path / "absent", "absent does not exist; a checkpoint is a directory written by herald-convert"),
        (
            tmp_path / "empty",
            "empty is not a herald_jax checkpoint (it has no herald.json); make one with herald-convert",
        ),
        (tmp_path / "hf", "hf is a Hugging Face checkpoint; convert it first with: herald-convert"),
        (tmp_path / "file", "file is not a directory; a checkpoint is a directory written by herald-convert"),
    ]:
        if path.name in ("empty", "hf"):
            path.mkdir()
        if path.name == "hf":
            (path / "config.json").write_text("{}")
        if path.name == "file":
            path.write_text("")
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        assert sentence in str(caught.value)


def edit(saved: Path, **changes: object) -> None:
    manifest = json.loads((saved / "herald.json").read_text())
    (saved / "herald.json").write_text(json.dumps({**manifest, **changes}))


def test_a_newer_version_is_refused(saved: Path) -> None:
    edit(saved, format_version=2)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved)
    assert str(caught.value) == (
        f"{saved} was written by a newer herald_jax (format version 2, this one reads up to 1); upgrade herald-jax"
    )


def test_damage_is_named(saved: Path) -> None:
    os.unlink(saved / "params/layers.0.mlp.down.kernel/0.0")
    with (saved / "params/head.kernel/0.0").open("ab") as file:
        file.truncate(100)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved)
    assert str(caught.value) == (
        f"{saved} is incomplete or damaged: params/head.kernel/0.0 has 100 bytes instead of 33792; "
        "params/layers.0.mlp.down.kernel/0.0 is missing; convert the source again"
    )


DESCRIBED = ("config", "params", "files", "provenance")


def test_damaged_manifests(saved: Path) -> None:
    good = json.loads((saved / "herald.json").read_text())
    edit(saved, config={**good["config"], "rotary": 1})
    with pytest.raises(CheckpointError, match="holds an invalid configuration: ModelConfig has unknown fields rotary"):
        read_manifest(saved)
    edit(saved, config=good["config"], params={**good["params"], "norm/scale": {"shape": [31], "dtype": "float32"}})
    with pytest.raises(CheckpointError, match=r"parameter norm/scale has shape \(31,\) instead of \(32,\)"):
        read_manifest(saved)
    edit(saved, format="something else")
    with pytest.raises(CheckpointError, match="has the format 'something else' instead of 'herald_jax checkpoint'"):
        read_manifest(saved)
    whole = json.dumps(good)
    forms = [json.dumps({**good, name: value}) for name in DESCRIBED for value in ([1], "x")]
    numbers = ["[" * 100_000, '{"format": ' + "9" * 5000 + "}"]  # what JSON may hold, but Python will not read
    for damaged in ("", "{", whole[: len(whole) // 2], "[]", *forms, *numbers):
        (saved / "herald.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"herald\.json is damaged .*; convert the source again"):
            read_manifest(saved)


MEMORY = """
    import sys
    import numpy as np
    from herald_jax import checkpoint
    from herald_jax.checkpoint import CheckpointWriter, LeafSource

    checkpoint.CHUNK_BYTES, checkpoint.IN_FLIGHT_BYTES = 8 << 20, 16 << 20
    rows, width = 100_000, 1024  # 200 MB of float16

    def read(step):
        for start in range(0, rows, step):
            yield np.zeros((min(step, rows - start), width), np.float16)

    def peak():  # kB; not ru_maxrss, which begins with the parent's
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

    before = peak()
    with CheckpointWriter(sys.argv[1]) as writer:
        writer.write_params({"embed/embedding": LeafSource((rows, width), np.dtype(np.float16), read)})
    print((peak() - before) // 1024)
"""


def test_memory_does_not_grow_with_a_leaf(tmp_path: Path) -> None:
    """200 MB through the writer, in chunks of 8 MB of which two are in flight."""
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        cwd=ROOT,
    )
    assert int(child.stdout) < 100
