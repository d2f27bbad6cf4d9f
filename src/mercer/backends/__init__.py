"""Other people's operators behind the forms' interface, used where they are faster; the plan names the one that ran."""
