"""Small language models of transformers, and what they are compared by."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fissile.layers import SparseLayer

WORDS = 40


def bert(**other):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=WORDS, intermediate_size=24, **sizes | other)
    return BertForSequenceClassification(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2))


def llama():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, intermediate_size=24, **sizes))


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=WORDS, d_ff=24, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


MODELS = {
    "bert": (bert, AutoModelForSequenceClassification),
    "gpt2": (gpt2, AutoModelForCausalLM),
    "llama": (llama, AutoModelForCausalLM),
    "t5": (t5, AutoModelForSeq2SeqLM),
}


def seeded(make=bert, **other):
    torch.manual_seed(0)
    return make(**other).eval()


def ids(rows=3):
    return torch.randint(1, WORDS, (rows, 7), generator=torch.Generator().manual_seed(1))


def logits(model):
    more = {"decoder_input_ids": ids()} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.eval()(input_ids=ids(), **more).logits


def expanded_layers(model):
    return {name: type(m) for name, m in model.named_modules() if isinstance(m, SparseLayer)}
