# The commands of this project; the README shows the first two.
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo test lint unit molecule clean lock controller tools

demo: controller  ## the main job, on a host made on this machine
	ansible-playbook playbooks/sandbox.yml -i inventory/sandbox
	ansible-playbook site.yml -i inventory/sandbox

test: lint unit molecule  ## all that needs no GPU

lint: tools  ## ansible-lint, yamllint, ruff, mypy
	ruff check .
	ruff format --check .
	mypy
	yamllint --strict .
	ansible-lint --offline

unit: tools  ## unit tests
	pytest

molecule: tools  ## scenarios in the sandbox
	NO_COLOR=1 molecule test --all

clean: controller  ## remove the sandbox, its hosts and all that was built
	ansible-playbook playbooks/sandbox.yml -i inventory/sandbox -e sandbox_state=absent
	rm -rf .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis .venv

lock: tools  ## resolve requirements/*.in again
	scripts/lock.sh

controller:
	@scripts/bootstrap.sh controller

tools:
	@scripts/bootstrap.sh test
