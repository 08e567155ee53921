"""Compiled programs on disk: what is stored is loaded, damage is found, and nobody else can write."""

import os
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard
from jax._src import compilation_cache

from jaxgen import InputError, JaxgenWarning, compile_cache, enable_cache

SETTINGS = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture
def enable(tmp_path):
    """Return a function that calls `enable_cache` as if in a new process."""
    before, store = {name: jax.config.values[name] for name in SETTINGS}, compilation_cache._cache

    def enable(root=tmp_path / "root"):
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        own = enable_cache(root)
        return None if own is None else Path(own)

    yield enable
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache._cache = store


@pytest.fixture
def stored(enable):
    """Return the only file of a cache that contains one program, that of `run`."""
    run()  # everything that does not depend on `run`'s function is now compiled
    directory = enable()
    run()
    (file,) = files(directory)
    return file


def run():
    """Trace and compile a function, or load its program, and run it."""
    return np.asarray(jax.jit(lambda x: jnp.sin(x) * 2.5)(np.arange(3.0, dtype=np.float32)))


def files(root: Path):
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_stored_programs_are_loaded_and_count_as_used(enable, stored):
    os.utime(stored, (1, 1))
    enable()
    np.testing.assert_allclose(run(), np.sin(np.arange(3)) * 2.5, rtol=1e-6)
    assert files(stored.parent) == [stored]
    assert stored.stat().st_mtime > 1


@pytest.mark.parametrize("compressor", [zstandard, None], ids=["zstd", "zlib"])
@pytest.mark.parametrize("at", [0.0, 0.01, 0.1, 0.3, 0.6, 0.999])
def test_flipped_bits_are_detected(enable, monkeypatch, compressor, at):
    monkeypatch.setattr(compilation_cache, "zstandard", compressor)
    run()
    directory = enable()
    expected = run()
    (file,) = files(directory)
    damaged = bytearray(file.read_bytes())
    damaged[int(at * len(damaged))] ^= 4
    file.write_bytes(damaged)
    enable()
    with pytest.warns(JaxgenWarning, match=f"{file.name} is damaged: its program is compiled again"):
        np.testing.assert_array_equal(run(), expected)
    assert files(directory) == [file]
    enable()
    run()  # now without a warning


@pytest.mark.parametrize("content", [b"", b"x" * 31, bytes(64), b"no program" * 20])
def test_other_damage_is_detected(enable, stored, content):
    stored.write_bytes(content)
    enable()
    with pytest.warns(JaxgenWarning, match="is damaged"):
        assert run().shape == (3,)


def test_unreadable_or_unwritable_file_draws_a_warning(enable, stored):
    stored.unlink()
    stored.mkdir()
    enable()
    with pytest.warns(JaxgenWarning) as caught:
        assert run().shape == (3,)
    texts = [str(warning.message) for warning in caught]
    assert texts[0].startswith("a program cannot be read and is compiled again: [Errno ")
    assert texts[1].startswith("a program cannot be stored: [Errno ")
    assert [path.name for path in stored.parent.iterdir()] == [stored.name]  # no temporary file is left


def test_least_recently_used_programs_are_removed(tmp_path, monkeypatch):
    own, other = tmp_path / "own", tmp_path / "other machine"
    monkeypatch.setattr(compile_cache, "_LIMIT", 250)
    for folder in (own, other):
        folder.mkdir()
        for number in range(3):
            (folder / f"{number}.program").write_bytes(b"x" * 100)
            os.utime(folder / f"{number}.program", (number, number))
    store = compile_cache._Store(own, tmp_path)
    store.put("new", b"x" * (50 - compile_cache._SIZE))
    assert [file.name for file in files(tmp_path)] == ["2.program", "2.program", "new.program"]
    assert store.get("new") == b"x" * (50 - compile_cache._SIZE)


def test_other_files_are_not_removed(enable, tmp_path, monkeypatch):
    names = ["weights.safetensors", "model/a.program", "jaxgen-programs/model/weights.safetensors"]
    for name in names:
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(b"x" * 100)
        (tmp_path / "root" / name).parent.chmod(0o700)
    monkeypatch.setattr(compile_cache, "_LIMIT", 50)
    enable()
    run()
    assert [str(file.relative_to(tmp_path / "root")) for file in files(tmp_path / "root")] == sorted(names)


class TestDirectory:
    def test_directory_is_private(self, enable, tmp_path):
        mask = os.umask(0)
        try:
            directory = enable(tmp_path / "a" / "b")
        finally:
            os.umask(mask)
        assert directory.is_relative_to(tmp_path / "a" / "b" / "jaxgen-programs")
        for folder in (directory, directory.parent, tmp_path / "a" / "b", tmp_path / "a"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    @pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
    @pytest.mark.parametrize("which", ["root", "own"])
    def test_directory_writable_by_others_is_not_used(self, enable, mode, which):
        own = enable()
        (own if which == "own" else own.parent).chmod(mode)
        with pytest.warns(JaxgenWarning, match=r"programs are not stored: other users can write to .*jaxgen-programs"):
            assert enable() is None
        assert jax.config.jax_compilation_cache_dir is None

    @pytest.mark.parametrize(("mode", "accepted"), [(0o775, True), (0o1777, True), (0o777, False)])
    def test_permissions_of_parents_are_checked(self, enable, tmp_path, mode, accepted):
        (tmp_path / "home").mkdir()
        (tmp_path / "home").chmod(mode)
        if accepted:
            assert enable(tmp_path / "home" / "root").is_dir()
        else:
            with pytest.warns(JaxgenWarning, match="other users can write to .*home$"):
                assert enable(tmp_path / "home" / "root") is None

    def test_directory_of_another_user_is_not_used(self, enable, monkeypatch):
        own = enable()
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 12345)
        monkeypatch.setattr(Path, "stat", _stat_of_owner(own.parent, os.getuid() + 7))
        with pytest.warns(JaxgenWarning, match="jaxgen-programs belongs to another user"):
            assert enable() is None

    def test_missing_home_draws_a_warning(self, enable, monkeypatch):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", _no_home)
        with pytest.warns(JaxgenWarning, match="programs are not stored: no home"):
            assert enable(None) is None

    def test_file_in_place_of_the_directory_draws_a_warning(self, enable, tmp_path):
        (tmp_path / "root").write_text("")
        with pytest.warns(JaxgenWarning, match="programs are not stored: .*root"):
            assert enable() is None

    def test_default_directory(self, enable, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert enable(None).parent == tmp_path / "jaxgen" / "programs"

    def test_another_directory_is_refused_once_jax_has_one(self, enable, tmp_path):
        own = enable()
        assert enable_cache() == enable_cache(tmp_path / "root") == str(own)
        with pytest.raises(InputError, match=r"jax already stores compiled programs in .*: leave directory out"):
            enable_cache(tmp_path / "other")

    def test_remote_directory_of_jax_is_kept(self, enable, tmp_path):
        enable()
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/programs")
        assert enable_cache() == "gs://bucket/programs"
        jax.config.update("jax_compilation_cache_dir", "")
        assert enable_cache(tmp_path) is not None

    def test_a_link_is_resolved_before_it_is_checked(self, enable, tmp_path):
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        (tmp_path / "open" / "link").symlink_to(tmp_path, target_is_directory=True)
        assert enable(tmp_path / "open" / "link").parent == tmp_path.resolve() / "jaxgen-programs"

    def test_cache_disabled_in_jax_stays_off(self, enable):
        jax.config.update("jax_enable_compilation_cache", False)
        try:
            assert enable() is None
        finally:
            jax.config.update("jax_enable_compilation_cache", True)

    def test_unknown_version_of_jax_draws_a_warning(self, enable, monkeypatch):
        monkeypatch.delattr(compilation_cache, "_cache")
        monkeypatch.setattr(compilation_cache, "reset_cache", lambda: None)
        with pytest.warns(JaxgenWarning, match="stores them in a way that this version of jaxgen does not know"):
            assert enable() is None


def _no_home():
    raise RuntimeError("no home")


def _stat_of_owner(owned: Path, owner: int):
    real = Path.stat

    def stat_of(self, **named):
        found = real(self, **named)
        uid = owner if self == owned else 0
        return os.stat_result([*found[:4], uid, *found[5:10]])

    return stat_of
