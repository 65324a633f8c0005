"""A served model on paper: a simulation fed with measured service times, checked and asked."""
