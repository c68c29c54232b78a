"""Real serving engines: started on this machine, measured, and compared with what is predicted of a draft."""
