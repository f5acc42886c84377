# The commands of this project; the README shows the first two.
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)

STACK ?= vllm-0.32.0
INVENTORY ?= inventory/example
GPU_RESULTS ?= .cache/bench-gpu
STACK_VENV := $(CURDIR)/.cache/stacks/$(STACK)-cpu
GATES := PYTHONPATH=module_utils:tests/patches:tests/unit OCTOSERVE_STACK=$(STACK) OCTOSERVE_STACK_VENV=$(STACK_VENV) python -m

FAULTS := PYTHONPATH=module_utils python -m tests.faults.run

.PHONY: demo test lint unit molecule test-patches test-gates test-gates-short test-faults test-stacks test-demo-patches test-gpu bench bench-gpu redeploy patches-import patches-export stack-new clean lock controller tools

demo: controller  ## the main job, on a host made on this machine
	ansible-playbook playbooks/sandbox.yml -i inventory/sandbox
	ansible-playbook site.yml -i inventory/sandbox
	@echo "It serves on: curl http://127.0.0.2:8000/v1/models   Its host: ssh -i .cache/sandbox/id_ed25519 -p 2222 admin@127.0.0.2"

test: lint unit test-patches test-gates-short molecule  ## all that needs no GPU
	@scripts/stale_results.py

lint: tools  ## ansible-lint, yamllint, ruff, mypy
	ruff check .
	ruff format --check .
	mypy
	yamllint --strict .
	ansible-lint --offline

unit: tools  ## unit tests
	pytest -n 2

molecule: tools  ## scenarios in the sandbox; those that mostly wait run side by side
	NO_COLOR=1 molecule test -s default
	@mkdir -p .cache
	@failed=0; for name in long_jobs redeploy service; do \
	    NO_COLOR=1 molecule test -s $$name >.cache/molecule-$$name.log 2>&1 & pids="$$pids $$!:$$name"; done; \
	for one in $$pids; do wait $${one%%:*} || failed=1; cat .cache/molecule-$${one##*:}.log; done; exit $$failed

test-patches: tools  ## the patched stack against transformers, and without each patch
	PYTHONPATH=module_utils python scripts/stack_venv.py $(STACK) cpu $(STACK_VENV)
	OCTOSERVE_STACK=$(STACK) OCTOSERVE_STACK_VENV=$(STACK_VENV) pytest tests/patches -n 2 --dist loadfile

test-gates-short: tools  ## real vLLM: a healthy server and three broken ones; the parsers; a scripted server
	PYTHONPATH=module_utils python scripts/stack_venv.py $(STACK) cpu $(STACK_VENV)
	OCTOSERVE_STACK=$(STACK) OCTOSERVE_STACK_VENV=$(STACK_VENV) pytest tests/gates

test-gates: test-gates-short  ## every mutant, fifty healthy runs of two models, throughput's own power (long; leaves results to commit)
	$(GATES) tests.gates.power
	$(GATES) tests.gates.healthy
	$(GATES) tests.gates.table
	$(GATES) tests.gates.throughput_power
	$(GATES) tests.gates.throughput_beside_vllm
	$(GATES) tests.gates.throughput_table

test-stacks: tools  ## the proofs on the other stacks (long; leaves results to commit)
	PYTHONPATH=module_utils:scripts python tests/stacks/proofs.py $(filter-out $(STACK),$(notdir $(wildcard files/patches/*)))

test-faults: tools  ## every fault, fifty kills of the controller at random tasks (long; leaves results to commit)
	for name in service redeploy default; do NO_COLOR=1 molecule converge -s $$name || exit 1; done
	$(FAULTS) service --host molecule-service=127.0.0.5 --save tests/faults/service.json
	$(FAULTS) service --engine real --model tiny-glm --host molecule-default=127.0.0.3 --save tests/faults/vllm.json
	$(FAULTS) redeploy --host molecule-redeploy=127.0.0.6 --all --random 50 --save tests/faults/redeploy.json
	python -m tests.faults.table
	for name in service redeploy default; do NO_COLOR=1 molecule destroy -s $$name || exit 1; done

test-demo-patches: tools  ## the demo without each patch in turn (long; leaves a result to commit)
	python tests/demo/without_each_patch.py

test-gpu: tools  ## what needs real cards
	pytest tests/gpu

redeploy: controller  ## deploy where something changed: INVENTORY=inventory/example [ARGS=--always]
	scripts/redeploy.py -i $(INVENTORY) $(ARGS)

bench: demo tools  ## merge and verification beside cp, with the tool that the demo built; loading beside a plain read; bench-gpu
	python tests/bench/merge_speed.py --tool $$(echo .cache/sandbox/hosts/sandbox/opt/octoserve/llama.cpp/*/bin/llama-gguf-split)
	PYTHONPATH=module_utils python scripts/stack_venv.py $(STACK) cpu $(STACK_VENV)
	python tests/bench/loading.py --python $(STACK_VENV)/bin/python --save
	$(MAKE) bench-gpu

bench-gpu: tools  ## sparse attention's speed on a card, where there is one: OCTOSERVE_CUDA_PYTHON=<python of a CUDA stack>
	python tests/gpu/bench.py $(GPU_RESULTS)

patches-import: tools  ## the stack as a git tree, one commit a patch: .cache/patches/$(STACK)
	PYTHONPATH=module_utils python scripts/patches_tree.py import files/patches/$(STACK) .cache/patches/$(STACK)

patches-export: tools  ## the tree's commits as patches and series.yml
	PYTHONPATH=module_utils python scripts/patches_tree.py export files/patches/$(STACK) .cache/patches/$(STACK)

stack-new: tools  ## a stack for another vLLM: FROM=<stack> VLLM=<release or commit> [INDEX=<url>] [REPLACE=1]
	PYTHONPATH=module_utils python scripts/stack_new.py files/patches/$(FROM) "$(VLLM)" --index="$(INDEX)" $(if $(REPLACE),--replace)

clean: controller  ## remove the sandbox, its hosts and all that was built
	ansible-playbook playbooks/sandbox.yml -i inventory/sandbox -e sandbox_state=absent
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .venv

lock: tools  ## resolve requirements/*.in again
	scripts/lock.py

controller:
	@scripts/bootstrap.sh controller

tools:
	@scripts/bootstrap.sh test
