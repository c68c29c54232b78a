"""Open questions without a right answer, written for this project: long, free text to measure speed on."""

QUESTIONS = (
    "Explain to a child why the sky is blue during the day and red at sunset.",
    "Describe how you would plan a week of meals for a family of four on a small budget.",
    "What are the arguments for and against letting cities close their centres to cars?",
    "Write a short story about a lighthouse keeper who receives a letter addressed to somebody else.",
    "How does a refrigerator move heat from a cold place to a warm one?",
    "Compare learning a language from a book with learning it by living among its speakers.",
    "Give advice to somebody who has to speak in public for the first time.",
    "Describe the life of a river from its spring to the sea.",
    "What makes a good scientific experiment? Illustrate your answer with an example.",
    "Write a friendly letter to a neighbour, asking for less noise in the evening.",
    "Explain what a hash table is, and when a sorted list serves better.",
    "How might daily life change if people lived to the age of two hundred?",
    "Describe the steps of baking bread, and say what each of them is for.",
    "Why do some ideas spread quickly while others are forgotten?",
    "Outline a beginner's plan for running five kilometres in eight weeks.",
    "Tell the story of an ordinary umbrella from its own point of view.",
    "What should a museum of the early twenty-first century show, and why?",
    "Explain compound interest with numbers, and name one common misunderstanding of it.",
    "How would you find out why a program has become slower than it was last month?",
    "Describe a market square in the morning, at noon and at night.",
)
