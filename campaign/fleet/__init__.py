"""What runs at the controller: budget, supervisors, resume; and the Ray actors that wrap them."""
