"""Opening models: device, number format, checks, and which runner serves one; imports eagle, runners and core."""
