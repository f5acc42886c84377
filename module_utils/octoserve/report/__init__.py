"""What a run's summary becomes, for people and for programs. On the controller only (requirements/controller.in)."""
