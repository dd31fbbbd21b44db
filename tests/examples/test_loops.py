"""The loops in examples/loops: every one runs, few lines change, and frameworks do what the page says of them."""

from __future__ import annotations

import copy
import pickle
import runpy
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import slangvi
from helpers.loop_scripts import FOLDER, LOOPS, Still, assert_same_step, load
from helpers.optimizer_runs import assert_identical

ROOT = Path(__file__).parents[2]
# Frameworks warn of many things that are not ours to change.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_runs_and_learns(name, capsys):
    script = load(name)
    common = load("common")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        if not LOOPS[name].needs and name != "compiled_loop":
            warnings.simplefilter("error")
        nll = common.compare(script.adam, script.slang, script.data.y_test)
    assert nll["SLANG"] < LOOPS[name].bound
    assert "held-out NLL (nats): Adam" in capsys.readouterr().out


@pytest.mark.parametrize("name", LOOPS)
def test_few_lines_change(name):
    changes = LOOPS[name].changes()
    assert len(changes) == LOOPS[name].changed
    assert sum("slangvi.SLANG(" in line for line in changes) == 1
    assert len(changes) <= 5


def test_every_script_has_a_row():
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"common", "table"}
    assert scripts == set(LOOPS)


def test_the_page_is_what_the_scripts_say():
    page = runpy.run_path(str(ROOT / "tools" / "loops.py"))["page"]()
    assert (ROOT / "docs" / "loops.md").read_text(encoding="utf-8") == page, "run make loops-page"


def test_what_the_loops_need_is_in_their_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = {need.partition(">")[0] for need in project["optional-dependencies"]["loops"]}
    assert {package for loop in LOOPS.values() for package in loop.needs} <= extra


# ---- Hugging Face Trainer


def trained(script, folder, make=slangvi.SLANG, generator=None, resume=None, **options):
    from transformers import Trainer

    torch.manual_seed(0)
    model = script.bert()
    told = {"num_data": script.data.size, "rank": 2, "lr": 0.1, "prior_precision": 30.0, "init_precision": 1000.0}
    opt = make(model, **told, generator=generator)
    arguments = script.arguments(str(folder), **({"max_steps": 4} | options))
    trainer = Trainer(model, arguments, train_dataset=script.data.rows(), optimizers=(opt, None))
    trainer.train(resume_from_checkpoint=resume)
    return opt


def test_trainer_resumes_exactly(tmp_path):
    script = load("trainer_loop")
    whole = trained(script, tmp_path / "whole")
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(script, tmp_path / "part", **saving)
    checkpoint = tmp_path / "part" / "checkpoint-2"
    resumed = trained(script, tmp_path / "rest", resume=str(checkpoint), **saving)
    assert resumed._state.step == 4
    assert_identical(whole, resumed)


def test_trainer_accumulates_two_half_batches_to_a_whole_one(tmp_path):
    script = load("trainer_loop")
    halves = trained(script, tmp_path / "a", Still)
    whole = trained(script, tmp_path / "b", Still, per_device_train_batch_size=30, gradient_accumulation_steps=1)
    assert halves.info.num_rows == whole.info.num_rows == 30
    assert_same_step(whole, halves)


def trained_to_speak(script, folder, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **special, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    steps = options.get("gradient_accumulation_steps", 1)
    opt = Still(model, num_data=script.data.size, rank=2, init_precision=1000.0, accumulation_steps=steps)
    rows = [row | {"labels": row["input_ids"]} for row in script.data.rows()[:60]]
    arguments = script.arguments(str(folder), max_steps=2, **options)
    Trainer(model, arguments, train_dataset=rows, optimizers=(opt, None)).train()
    return opt


def test_trainer_has_language_models_divide_by_all_micro_batches(tmp_path):
    script = load("trainer_loop")
    halves = trained_to_speak(script, tmp_path / "a", gradient_accumulation_steps=2)
    sizes = {"per_device_train_batch_size": 30, "gradient_accumulation_steps": 1}
    whole = trained_to_speak(script, tmp_path / "b", **sizes)
    assert_same_step(whole, halves)


def test_trainer_divides_a_loss_of_ones_own_by_nothing(tmp_path):
    """Three micro-batches are a step of two and a step of one."""
    script = load("trainer_loop")
    from transformers import Trainer

    losses = [None, lambda outputs, labels, **_: F.cross_entropy(outputs.logits, labels)]
    found = []
    for name, loss in zip("ab", losses, strict=True):
        model = script.bert()
        opt = Still(model, num_data=script.data.size, rank=2, init_precision=1000.0)
        arguments = script.arguments(str(tmp_path / name))
        rows = script.data.rows()[:45]
        trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(opt, None), compute_loss_func=loss)
        trainer.model_accepts_loss_kwargs = loss is None  # this model's loss is its own mean, too
        trainer.train()
        found.append(opt)
    assert found[0].info.num_rows == found[1].info.num_rows == 15
    assert_same_step(*found)


def test_trainer_builds_the_optimizer_from_class_and_arguments(tmp_path):
    script = load("trainer_loop")
    from transformers import Trainer

    model = script.bert()
    made = (slangvi.SLANG, {"model": model, "num_data": script.data.size, "init_precision": 1000.0})
    arguments = script.arguments(str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=1)
    rows = script.data.rows()
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:10], optimizer_cls_and_kwargs=made)
    trainer.train()
    assert trainer.optimizer.optimizer.info.step == 2
    assert torch.equal(
        trainer.optimizer.optimizer.posterior.loc[:320], model.bert.embeddings.word_embeddings.weight.flatten()
    )


# ---- Lightning


def fitted(script, folder, epochs=2, make=slangvi.SLANG, loader=None, resume=None, options=None, **trainer):
    from lightning import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    told = {"num_data": 240, "rank": 2, "lr": 0.1, "generator": torch.Generator().manual_seed(3)} | (options or {})

    class Module(script.SLANG):
        def configure_optimizers(self):
            opt = make(self.net, **told)
            return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 1)}

    module = Module(load("common").network())
    loader = loader or torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(script.data.x_train, script.data.y_train), 20
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    saving = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")
    Trainer(max_epochs=epochs, callbacks=[saving], **quiet, **trainer).fit(module, loader, ckpt_path=resume)
    return module.optimizers().optimizer


def test_lightning_resumes_exactly(tmp_path):
    script = load("lightning_loop")
    whole = fitted(script, tmp_path / "whole")
    fitted(script, tmp_path / "part", epochs=1)
    resumed = fitted(script, tmp_path / "rest", resume=str(tmp_path / "part" / "epoch=0.ckpt"))
    assert resumed._state.step == 24
    assert_identical(whole, resumed)


def test_lightning_accumulates_two_half_batches_to_a_whole_one(tmp_path):
    script = load("lightning_loop")
    data = torch.utils.data.TensorDataset(script.data.x_train, script.data.y_train)
    loader = torch.utils.data.DataLoader
    whole = fitted(script, tmp_path / "a", make=Still, loader=loader(data, 40))
    options = {"accumulation_steps": 2}
    halves = fitted(
        script, tmp_path / "b", make=Still, loader=loader(data, 20), options=options, accumulate_grad_batches=2
    )
    assert halves.info.num_rows == whole.info.num_rows == 40
    assert_same_step(whole, halves)


def test_lightning_with_a_grad_scaler_draws_outside_step(tmp_path):
    script = load("lightning_loop")
    from lightning.pytorch.plugins import MixedPrecision

    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    opt = fitted(script, tmp_path, epochs=1, plugins=[scaled])
    assert opt._state.step == 12
    assert opt.info.num_rows == 20


def test_lightning_leaves_out_batches_without_a_loss(tmp_path):
    script = load("lightning_loop")
    data = torch.utils.data.TensorDataset(script.data.x_train, script.data.y_train)

    class Choosy(script.SLANG):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)

    choosy = SimpleNamespace(SLANG=Choosy, data=script.data)
    opt = fitted(choosy, tmp_path, epochs=1, loader=torch.utils.data.DataLoader(data, 20))
    assert opt._state.step == 8


def test_lightning_closures_take_several_draws(tmp_path):
    script = load("lightning_loop")
    opt = fitted(script, tmp_path, epochs=1, options={"mc_samples": 3})
    assert opt.info.num_rows == 60


def test_lightning_wrappers_leave_nothing_behind(tmp_path):
    """The optimizer of `self.optimizers()` runs our methods as its own; what they change must reach the real one."""
    load("lightning_loop")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = load("common").network()
    opt = slangvi.SLANG(model, num_data=240, rank=2)
    wrapper = LightningOptimizer(opt)
    before = set(vars(wrapper))
    with wrapper.sampled_params(train=True):
        F.cross_entropy(model(torch.randn(6, 10)), torch.arange(6) % 3).backward()
    assert opt.has_gradients
    opt.step()
    assert not wrapper.has_gradients
    assert torch.equal(wrapper.posterior.loc, opt.posterior.loc)
    assert wrapper.kl() == opt.kl()
    wrapper.zero_grad()
    wrapper.discard_gradients()
    assert set(vars(wrapper)) == before


def wrapped(params=slice(None)):
    load("lightning_loop")
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = load("common").network()
    opt = slangvi.SLANG(model, list(model.parameters())[params], num_data=240, rank=2)
    return model, opt, LightningOptimizer(opt)


def one_step(model, opt):
    with opt.sampled_params(train=True):
        F.cross_entropy(model(torch.randn(6, 10)), torch.arange(6) % 3).backward()
    opt.step()


def test_lightning_wrappers_tell_what_the_optimizer_does():
    model, opt, wrapper = wrapped()
    steps = []
    slangvi.track(wrapper, lambda numbers, step: steps.append(step))
    assert wrapper.info is None
    one_step(model, opt)
    assert wrapper.info is opt.info
    assert wrapper.rank == 2
    assert steps == [1]


@pytest.mark.parametrize("way", ["state_dict", "file"])
def test_lightning_wrappers_save_and_load_the_optimizer(way, tmp_path):
    model, opt, wrapper = wrapped()
    one_step(model, opt)
    before, inside = opt._state, set(vars(wrapper))
    if way == "file":
        slangvi.save(tmp_path / "run.safetensors", wrapper)
    else:
        saved = wrapper.state_dict()
    one_step(model, opt)
    if way == "file":
        slangvi.load(tmp_path / "run.safetensors", wrapper)
        slangvi.load(tmp_path / "run.safetensors", slangvi.SLANG(load("common").network(), num_data=240, rank=2))
    else:
        wrapper.load_state_dict(saved)
    assert opt._state.step == 1
    assert torch.equal(opt._state.loc, before.loc)
    assert set(vars(wrapper)) == inside


def test_lightning_wrappers_add_parameters_to_the_optimizer():
    model, opt, wrapper = wrapped(slice(2, None))
    one_step(model, opt)
    wrapper.add_param_group({"params": list(model[0].parameters())})
    assert opt.posterior.event_shape == wrapper.posterior.event_shape == (10 * 32 + 32 + 32 * 3 + 3,)
    one_step(model, opt)
    assert opt.info.step == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_a_lightning_wrapper_is_an_optimizer(copied):
    model, opt, wrapper = wrapped()
    one_step(model, opt)
    twin = copied(wrapper)
    assert type(twin) is slangvi.SLANG
    assert_identical(opt, twin)


# ---- Accelerate


def accelerated(script, batch_size, steps, accumulation_steps):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model = load("common").network()
    raw = Still(model, num_data=240, rank=2, accumulation_steps=accumulation_steps)
    data = torch.utils.data.TensorDataset(script.data.x_train, script.data.y_train)
    model, opt, loader = accelerator.prepare(model, raw, torch.utils.data.DataLoader(data, batch_size))
    for x, y in loader:
        with accelerator.accumulate(model):
            opt.zero_grad()
            opt.train()
            accelerator.backward(F.cross_entropy(model(x), y))
            opt.step()
    return raw, accelerator


def test_accelerate_accumulates_two_half_batches_to_a_whole_one():
    script = load("accelerate_loop")
    whole, _ = accelerated(script, 40, 1, 1)
    halves, _ = accelerated(script, 20, 2, 2)
    assert halves._state.step == whole._state.step == 6
    assert_same_step(whole, halves)


def test_accelerate_saves_and_loads_the_state(tmp_path):
    script = load("accelerate_loop")
    opt, accelerator = accelerated(script, 40, 1, 1)
    accelerator.save_state(tmp_path)
    mean, precision = opt.posterior.loc.clone(), opt.posterior.prec_diag.clone()
    with opt.sampled_params(train=True):
        F.cross_entropy(opt.model(script.data.x_train), script.data.y_train).backward()
    opt.step()
    assert not torch.equal(opt.posterior.loc, mean)
    accelerator.load_state(tmp_path)
    assert torch.equal(opt.posterior.loc, mean)
    assert torch.equal(opt.posterior.prec_diag, precision)


# ---- PEFT


def test_adapters_alone_have_a_posterior():
    script = load("lora_loop")
    model = script.adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    opt = slangvi.SLANG(model, num_data=100, rank=2)
    assert opt.posterior.param_spec.names
    assert all("lora_" in name for name in opt.posterior.param_spec.names)
    opt.train()
    F.cross_entropy(model(script.data.x_train[:8]).logits, script.data.y_train[:8]).backward()
    opt.step()
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen)
