"""The decoder against models of `transformers`, weight for weight. Every parameter is drawn again, since default
initialisation hides faults (a wrong rotary base moved logits by 3e-4)."""

import pytest
import torch

from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers

VOCABULARY, DIM, LAYERS, HEADS = 96, 32, 2, 4


def redraw(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


def llama(kind, **values):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=56,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=128,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **values,
    )
    return redraw(getattr(transformers, f"{kind}ForCausalLM")(config))


def from_llama(peer, **values):
    c = peer.config
    model = DecoderLM(
        ModelConfig(
            vocab_size=VOCABULARY,
            dim=DIM,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=c.num_key_value_heads,
            hidden=56,
            norm_eps=c.rms_norm_eps,
            tie_embeddings=c.tie_word_embeddings,
            rope_base=c.rope_parameters["rope_theta"],
            **values,
        )
    )
    theirs = peer.state_dict()
    ours = {"embedding.weight": theirs["model.embed_tokens.weight"], "norm.weight": theirs["model.norm.weight"]}
    if not c.tie_word_embeddings:
        ours["head.weight"] = theirs["lm_head.weight"]
    for i in range(LAYERS):
        a, b = f"model.layers.{i}", f"blocks.{i}"
        ours |= {
            f"{b}.attention.qkv.weight": torch.cat([theirs[f"{a}.self_attn.{x}_proj.weight"] for x in "qkv"]),
            f"{b}.attention.output.weight": theirs[f"{a}.self_attn.o_proj.weight"],
            f"{b}.feedforward.input.weight": torch.cat([theirs[f"{a}.mlp.{x}_proj.weight"] for x in ("gate", "up")]),
            f"{b}.feedforward.output.weight": theirs[f"{a}.mlp.down_proj.weight"],
            f"{b}.attention_norm.weight": theirs[f"{a}.input_layernorm.weight"],
            f"{b}.feedforward_norm.weight": theirs[f"{a}.post_attention_layernorm.weight"],
        }
    model.load_state_dict(ours)
    return model.eval()


def assert_same(ours, theirs):
    """Equal to 1e-5 of the largest number, or to 1e-5 where all are small."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item()))


def same_logits_and_loss(model, peer, length=40):
    tokens = torch.randint(0, VOCABULARY, (2, length))
    with torch.no_grad():
        assert_same(model(tokens), peer(tokens).logits)
    theirs = peer(tokens, labels=tokens).loss
    ours = model.loss(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    return ours, theirs


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_llama(kv_heads, tied):
    peer = llama(
        "Llama",
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    model = from_llama(peer)
    for loss in same_logits_and_loss(model, peer):
        loss.backward()
    grad = peer.model.embed_tokens.weight.grad
    torch.testing.assert_close(model.embedding.weight.grad, grad, rtol=1e-4, atol=1e-5)
    first = model.blocks[0].attention.qkv.weight.grad
    theirs = torch.cat([getattr(peer.model.layers[0].self_attn, f"{x}_proj").weight.grad for x in "qkv"])
    torch.testing.assert_close(first, theirs, rtol=1e-4, atol=1e-5)


def test_mistral_with_a_sliding_window():
    peer = llama("Mistral", num_key_value_heads=2, sliding_window=8, attn_implementation="eager")
    same_logits_and_loss(from_llama(peer, window=8), peer)


def test_llama_with_left_padding():
    peer = llama("Llama", num_key_value_heads=2)
    model = from_llama(peer)
    tokens, keep = torch.randint(0, VOCABULARY, (2, 17)), torch.ones(2, 17, dtype=torch.bool)
    keep[1, :5] = False
    positions = (keep.long().cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        theirs = peer(tokens, attention_mask=keep.long(), position_ids=positions).logits
        assert_same(model(tokens, padding=keep)[keep], theirs[keep])


def test_gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=DIM,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = redraw(transformers.GPT2LMHeadModel(config))
    model = DecoderLM(
        ModelConfig(
            vocab_size=VOCABULARY,
            dim=DIM,
            layers=LAYERS,
            heads=HEADS,
            position="learned",
            max_length=64,
            norm="layer",
            norm_eps=config.layer_norm_epsilon,
            feedforward="gelu_tanh",
            bias=True,
        )
    )
    theirs = peer.state_dict()
    names = {
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feedforward.input": "mlp.c_fc",
        "feedforward.output": "mlp.c_proj",
        "attention_norm": "ln_1",
        "feedforward_norm": "ln_2",
    }
    ours = {
        "embedding.weight": theirs["transformer.wte.weight"],
        "positions.weight": theirs["transformer.wpe.weight"],
        "norm.weight": theirs["transformer.ln_f.weight"],
        "norm.bias": theirs["transformer.ln_f.bias"],
    }
    for i in range(LAYERS):
        for mine, other in names.items():
            for part in ("weight", "bias"):
                value = theirs[f"transformer.h.{i}.{other}.{part}"]
                ours[f"blocks.{i}.{mine}.{part}"] = value.t() if value.dim() == 2 else value  # stored [in, out]
    model.load_state_dict(ours)
    same_logits_and_loss(model.eval(), peer)


@pytest.mark.parametrize("heads", [4, 6])
def test_bloom(heads):
    """ALiBi, against a model whose bias counts keys instead of distances: the same under softmax."""
    dim = 8 * heads
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=dim,
        n_layer=LAYERS,
        n_head=heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    peer = redraw(transformers.BloomForCausalLM(config))
    model = DecoderLM(
        ModelConfig(
            vocab_size=VOCABULARY,
            dim=dim,
            layers=LAYERS,
            heads=heads,
            position="alibi",
            norm="layer",
            norm_eps=config.layer_norm_epsilon,
            feedforward="gelu_tanh",
            bias=True,
        )
    )
    theirs = {name.removeprefix("transformer."): value for name, value in peer.state_dict().items()}
    names = {
        "attention.qkv": "self_attention.query_key_value",
        "attention.output": "self_attention.dense",
        "feedforward.input": "mlp.dense_h_to_4h",
        "feedforward.output": "mlp.dense_4h_to_h",
        "attention_norm": "input_layernorm",
        "feedforward_norm": "post_attention_layernorm",
    }
    ours = {"embedding.weight": theirs["word_embeddings.weight"]}
    ours |= {f"norm.{part}": theirs[f"ln_f.{part}"] for part in ("weight", "bias")}
    for i in range(LAYERS):
        for mine, other in names.items():
            for part in ("weight", "bias"):
                value = theirs[f"h.{i}.{other}.{part}"]
                if mine == "attention.qkv":  # stored [head, q|k|v, channel]
                    value = value.unflatten(0, (heads, 3, 8)).transpose(0, 1).flatten(0, 2)
                ours[f"blocks.{i}.{mine}.{part}"] = value
    model.load_state_dict(ours)
    # BLOOM normalises its embeddings; ours does not, so the comparison starts behind that norm.
    tokens = torch.randint(0, VOCABULARY, (2, 30))
    with torch.no_grad():
        hidden = peer.transformer.word_embeddings_layernorm(peer.transformer.word_embeddings(tokens))
        for block in model.eval().blocks:
            hidden = block(hidden)
        assert_same(model.norm(hidden), peer.transformer(tokens).last_hidden_state)
