"""The few types that decoding is made of: proposal, sampling, acceptance, stopping, trace; imports nothing of decode."""  # noqa: E501
