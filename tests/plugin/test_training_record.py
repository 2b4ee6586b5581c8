"""What a checkpoint says of its training beside the adapter, and resuming with and without it."""

from types import SimpleNamespace

import pytest

from axolotl_supertune.engines.processes import Processes
from axolotl_supertune.plugin import plugin as plugin_module
from axolotl_supertune.plugin import resume
from axolotl_supertune.plugin.callbacks import CheckSaves
from axolotl_supertune.plugin.training_record import FILE, WriteTrainingRecord, read_training_record


def written(tmp_path, sparse_lr):
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    callback = WriteTrainingRecord(Processes(1.0, ""), sparse_lr)
    callback.on_save(SimpleNamespace(output_dir=tmp_path), SimpleNamespace(global_step=3), None)
    return checkpoint


@pytest.mark.parametrize("sparse_lr", [None, 0.01, 1])
def test_a_checkpoint_is_resumed_with_its_own_rate_only(tmp_path, sparse_lr):
    checkpoint = written(tmp_path, sparse_lr)
    assert read_training_record(checkpoint) == {"sparse_lr": sparse_lr}
    resume._check_sparse_lr(SimpleNamespace(sparse_lr=sparse_lr), checkpoint)
    with pytest.raises(ValueError, match=r"sparse_lr: 0\.5, but the checkpoint .* was trained with .*Set it back"):
        resume._check_sparse_lr(SimpleNamespace(sparse_lr=0.5), checkpoint)


def test_a_checkpoint_without_the_record_is_resumed_and_says_so(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr(resume.LOG, "warning", lambda message, *args: warned.append(message % args))
    resume._check_sparse_lr(SimpleNamespace(sparse_lr=0.5), tmp_path)
    assert len(warned) == 1
    assert "does not say with which sparse_lr" in warned[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sparse_lr"'])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=rf"resume_from_checkpoint: .*{FILE} is damaged.*elete it to resume without"):
        resume._check_sparse_lr(SimpleNamespace(sparse_lr=0.5), tmp_path)


def test_the_record_is_written_before_the_checkpoint_is_checked(tmp_path, monkeypatch):
    engine = SimpleNamespace(prepare_trainer=lambda trainer: None)
    monkeypatch.setattr(plugin_module, "running_engine", lambda cfg, trainer: engine)
    plugin = plugin_module.SupertunePlugin()
    plugin._processes = Processes(1.0, "")
    cfg = SimpleNamespace(adapter="supra", sparse_lr=0.5, output_dir=str(tmp_path))
    callbacks = plugin.add_callbacks_post_trainer(cfg, SimpleNamespace(args=SimpleNamespace(n_gpu=1)))
    kinds = [type(callback) for callback in callbacks]
    assert kinds.index(WriteTrainingRecord) < kinds.index(CheckSaves)
