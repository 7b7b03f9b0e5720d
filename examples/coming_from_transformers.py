"""Question: what does `model.generate` of transformers look like here?

Command:  python examples/coming_from_transformers.py
Run time: seconds on a CPU
Expected: the same tokens from both, with a drafter that needs no training and with transformers' own settings
"""

# --8<-- [start:load]
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetflow import PromptLookupDrafter, SpeculativeDecoder, Target

model = AutoModelForCausalLM.from_pretrained("models/tiny/target", dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained("models/tiny/target")
question = "Tina has 3 eggs and Jack has 6 times as many. How many eggs do they have together?"
chat = [{"role": "user", "content": question}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
# --8<-- [end:load]

# --8<-- [start:theirs]
theirs = model.generate(**inputs, prompt_lookup_num_tokens=10, max_new_tokens=100, do_sample=False)
# --8<-- [end:theirs]

# --8<-- [start:ours]
decoder = SpeculativeDecoder(Target(model, tokenizer), PromptLookupDrafter(), budget=16)
ours = decoder.generate(inputs["input_ids"][0].tolist(), max_new_tokens=100)
# --8<-- [end:ours]
assert ours.token_ids == theirs[0, inputs["input_ids"].shape[1] :].tolist()
print(ours.text)
print("the same tokens from both")

# --8<-- [start:settings]
from transformers import GenerationConfig

config = GenerationConfig(
    max_new_tokens=100,
    repetition_penalty=1.1,
    no_repeat_ngram_size=6,
    stop_strings=["\n\n"],
)
result = decoder.generate(inputs["input_ids"][0].tolist(), generation_config=config, log_probs=5)
# --8<-- [end:settings]
theirs = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
assert result.token_ids == theirs[0, inputs["input_ids"].shape[1] :].tolist()
print("and under penalties and stop strings")
