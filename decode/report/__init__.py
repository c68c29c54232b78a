"""Tables, figures and HTML pages of results; imports measure and below."""
