"""What cannot be computed as the model means it is refused with a sentence, not computed as something else."""

import subprocess
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")
from tests.integrations.transformers.zoo import make, tokens  # noqa: E402

from mercer import BigBird, Causal, Documents, InvalidArgument, Padding, SigmoidGate, Sum, Taylor, Unsupported  # noqa: E402
from mercer.errors import StorageError  # noqa: E402
from mercer.integrations.transformers import load_kernel_tensors, register, swap_attention  # noqa: E402

pytestmark = pytest.mark.peers


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("gemma2", "taylor4-sum", "caps its scores.*meaning for Exp"),
        ("gpt_oss", "exp-l2", "sinks.*L2.* has none: use Sum"),
    ],
)
def test_models_whose_attention_has_more_in_it(kind, name, sentence):
    model = swap_attention(make(kind), name)
    with pytest.raises(Unsupported, match=sentence):
        model(input_ids=tokens(1, 5))


def test_models_that_do_not_let_their_attention_be_chosen():
    with pytest.raises(Unsupported, match=r"computes its attention itself \(BloomForCausalLM, BloomModel\)"):
        swap_attention(make("bloom"), "softmax")


def test_models_without_attention():
    model = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(Unsupported, match="MambaForCausalLM has no attention to swap"):
        swap_attention(model, "softmax")


@pytest.mark.parametrize(("kind", "option"), [("llama", "attention_dropout"), ("gpt2", "attn_pdrop")])
def test_dropout_of_attention_weights(kind, option):
    model = swap_attention(make(kind, **{option: 0.1}), "softmax")
    model.eval()(input_ids=tokens(1, 5))  # no dropout, no matter
    model.train()
    with pytest.raises(Unsupported, match=f"has no dropout.*asks for 0.1.*{option}"):
        model(input_ids=tokens(1, 5))
    swap_attention(model, "softmax", leave_out_dropout=True)
    model(input_ids=tokens(1, 5))
    swap_attention(make(kind, **{option: 0.0}), "softmax").train()(input_ids=tokens(1, 5))


@pytest.mark.parametrize("option", ["head_mask", "cu_seq_lens_q", "seq_idx", "something_new"])
def test_arguments_that_are_not_known_to_leave_the_attention_alone(option):
    model = swap_attention(make("llama"), "softmax")
    with pytest.raises(Unsupported, match=f"was given {option}"):
        model(input_ids=tokens(1, 5), **{option: torch.tensor([0, 5])})


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_weights_of_attention(kind):
    model = swap_attention(make(kind), "softmax")
    with pytest.raises(Unsupported, match="weights are not kept"):
        model(input_ids=tokens(1, 5), output_attentions=True)


def test_learned_maps_that_were_never_made():
    model = make("llama")
    model.set_attn_implementation(register("hedgehog-sum"))
    with pytest.raises(InvalidArgument, match=r"swap_attention\(model"):
        model(input_ids=tokens(1, 5))


def test_a_mask_of_a_wrong_shape():
    model = swap_attention(make("llama"), "softmax")
    with pytest.raises(InvalidArgument, match=r"must be \[B, heads or 1, 5, 5\]"):
        model(input_ids=tokens(1, 5), attention_mask=torch.ones(1, 1, 4, 5, dtype=torch.bool))


class TestNames:
    @pytest.mark.parametrize("name", ["taylor", "softmaxx", "mercer:taylor4", "taylor4_l2", ""])
    def test_unknown(self, name):
        with pytest.raises(InvalidArgument, match="Unknown attention"):
            register(name)
        with pytest.raises(InvalidArgument, match="Unknown attention"):
            swap_attention(make("llama"), name)

    def test_no_string(self):
        with pytest.raises(InvalidArgument, match="must be a string"):
            register(Taylor(2))

    @pytest.mark.parametrize("name", ["my flash", "flash-like", "UPPER", "a/b", "a:b", "-x", "xsdpa"])
    def test_that_transformers_would_read_as_something_else(self, name):
        with pytest.raises(InvalidArgument, match="cannot be a name"):
            register(name, kernel=Taylor(2))

    def test_of_the_grammar_with_other_parts(self):
        with pytest.raises(InvalidArgument, match="already names an attention"):
            register("softmax", kernel=Taylor(2))

    def test_signed_kernels_with_denominators(self):
        with pytest.raises(Unsupported, match="takes negative values"):
            register("taylor3-sum")
        with pytest.raises(Unsupported, match="takes negative values"):
            swap_attention(make("llama"), kernel=Taylor(3), normalizer=Sum())

    def test_gates_that_nobody_makes(self):
        with pytest.raises(Unsupported, match="gates of the input"):
            register("exp-gate")
        with pytest.raises(Unsupported, match="gates of the input"):
            swap_attention(make("llama"), normalizer=SigmoidGate())

    @pytest.mark.parametrize(
        "structure", [Padding(lengths=torch.tensor([3])), Causal() & Documents(torch.tensor([0, 3]))]
    )
    def test_structures_of_a_batch(self, structure):
        with pytest.raises(Unsupported, match="belong to a batch"):
            register("mine", structure=structure)

    @pytest.mark.parametrize("parts", [{"kernel": "taylor2"}, {"normalizer": Taylor(2)}, {"structure": "causal"}])
    def test_parts_that_are_none(self, parts):
        with pytest.raises(InvalidArgument, match=f"{next(iter(parts))} must be"):
            register("mine", **parts)


class TestArguments:
    def test_no_model(self):
        with pytest.raises(InvalidArgument, match="PreTrainedModel"):
            swap_attention(torch.nn.Linear(2, 2), "softmax")

    def test_nothing_to_swap_in(self):
        with pytest.raises(InvalidArgument, match="give a name"):
            swap_attention(make("llama"))

    def test_a_name_and_parts(self):
        with pytest.raises(InvalidArgument, match="not both"):
            swap_attention(make("llama"), "softmax", kernel=Taylor(2))

    def test_layers_that_are_not_there(self):
        with pytest.raises(InvalidArgument, match=r"has layers \[0, 1\], not \[7\]"):
            swap_attention(make("llama"), "softmax", layers=[0, 7])

    def test_layers_that_are_no_numbers(self):
        with pytest.raises(InvalidArgument, match=r"such as \[0, 1\], not 1"):
            swap_attention(make("llama"), "softmax", layers=1)

    def test_a_kernel_in_place_of_a_name(self):
        with pytest.raises(InvalidArgument, match="parts are given as kernel="):
            swap_attention(make("llama"), Taylor(4))

    def test_inputs_on_which_the_model_does_not_run(self):
        model = make("vit")
        with pytest.raises(InvalidArgument, match="pass inputs="):
            swap_attention(model, "hedgehog-sum")
        assert model.config._attn_implementation == "sdpa"

    def test_no_kernel_tensors_to_load(self, tmp_path):
        with pytest.raises(InvalidArgument, match="call swap_attention first"):
            load_kernel_tensors(make("llama"), tmp_path)

    def test_a_folder_without_kernel_tensors(self, tmp_path):
        make("llama").save_pretrained(tmp_path)
        model = swap_attention(make("llama"), "hedgehog-sum")
        with pytest.raises(StorageError, match="does not hold"):
            load_kernel_tensors(model, tmp_path)
        with pytest.raises(StorageError, match=r"has no model\.safetensors"):
            load_kernel_tensors(model, tmp_path / "nowhere")


def test_a_kernel_that_is_refused_leaves_the_model_as_it_was():
    model = make("llama")
    with pytest.raises(Unsupported):
        swap_attention(model, "taylor3-sum")
    assert model.config._attn_implementation == "sdpa"


def test_asking_for_mercer_imports_no_transformers():
    code = "import mercer, sys; mercer.attention; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_older_transformers_is_refused_at_once():
    code = """
from transformers import masking_utils
masking_utils.sdpa_mask = lambda batch_size, cache_position, kv_length: None
import mercer.integrations.transformers
"""
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert "ImportError: mercer.integrations.transformers is written for transformers 5.24" in run.stderr


def test_patterns_that_depend_on_the_length_do_not_go_on_from_a_cache():
    model = swap_attention(make("llama"), "softmax", structure=BigBird(2, random=1))
    ids = tokens(1, 9)
    whole = model(input_ids=ids, use_cache=True)
    with pytest.raises(Unsupported, match=r"depends on the length.*use_cache=False"):
        model(input_ids=ids[:, -1:], cache=whole.cache)
    model.generate(ids, max_new_tokens=2, use_cache=False, do_sample=False)
