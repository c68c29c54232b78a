# ruff: noqa: E501 - tables of sentences, one sentence or row a line
"""Wordings of the built-in word problems: who, what, and how a step is asked and solved.

A scene is a whole problem: the numbers it draws, its question, its solution. A story is put together at random
from an opening, one to four events and a closing; a row of theirs is ``question | solution``.

In a text ``{n}`` is filled in, ``(one|two)`` is a free choice, and a solution's ``[n+m=r]`` computes ``r`` and
writes ``12+5 = <<12+5=17>>17``. Among the numbers, ``n`` is a small one, ``n:tiny`` and ``n:big`` are what they say
(ranges: `decode.prompts.arithmetic.SIZES`), and ``t=n*m`` follows from others, which is how divisions come out even.
"""

SHE = {"he": "she", "He": "She", "his": "her", "him": "her"}
HE = {"he": "he", "He": "He", "his": "his", "him": "him"}
WOMEN = """Mia Ana Eva Zoe Lily Nora Ruth Emma Kate Rosa"""
MEN = """Tom Sam Ben Leo Max Jack Omar Ivan Luis Noah"""
ITEMS = """
apple book pen card coin sticker marble shell stamp cookie egg flower balloon toy ball pear cup
hat candle button bead pencil lemon muffin plant stone
"""
CONTAINERS = """boxes bags baskets jars bowls"""
PLACES = """market school park farm garden library"""
DAYS = """Monday Tuesday Wednesday Thursday Friday Saturday Sunday"""

# t: how many there are at first
OPENINGS = """
{a} has {t} {x} in {his} room. | {a} starts with {t} {x}.
On {day} {a} has {t} {x} in a bag. | On {day} {a} has {t} {x}.
{a} collects {x} and keeps {t} of them at home. | At first {a} keeps {t} {x}.
There are {t} {x} on the table of {a}. | At first there are {t} {x} on the table.
{a} comes back from the {place} with {t} {x}. | {a} comes back with {t} {x}.
"""

# from t by n to u; third column: the only ones that n may take
EVENTS = """
{b} gives {him} {n} more {x}. | {b} gives {him} {n} more, so {he} has [t+n=u] {x}.
Then {he} buys {n} more {x} in a shop. | After the shop {he} has [t+n=u] {x}.
At the {place} {he} finds {n} {x}. | With the {x} from the {place} {he} has [t+n=u] {x}.
The mother of {a} adds {n} more {x}. | The mother of {a} adds {n}, which makes [t+n=u] {x}.
Then {he} gets {n} {x} for {his} birthday. | After {his} birthday {he} has [t+n=u] {x}.
{b} brings another {n} {x}. | When {b} brings {n} {x}, there are [t+n=u] {x}.
{He} gives {n} of them to {b}. | {He} gives {n} to {b} and keeps [t-n=u] {x}.
Then {he} loses {n} {x} on the way. | {He} loses {n}, so [t-n=u] {x} are left.
{He} sells {n} {x} at the {place}. | After selling {n} {x} {he} has [t-n=u] {x}.
{b} takes {n} of the {x}. | {b} takes {n}, which leaves [t-n=u] {x}.
{He} throws away {n} old {x}. | Without the {n} old ones there are [t-n=u] {x}.
{He} leaves {n} {x} at the {place}. | {He} leaves {n} at the {place} and has [t-n=u] {x}.
The next day {he} has {n} times as many {x}. | {n} times as many is [t*n=u] {x}. | 2 3 4
Then {b} doubles the number of {x}. | Twice as many is [t*n=u] {x}. | 2
In a week the number of {x} grows {n} times. | It grows {n} times to [t*n=u] {x}. | 2 3 5
{He} gives half of the {x} to {b}. | After giving away half {he} has [t/n=u] {x}. | 2
{He} puts them in {n} equal piles and keeps one pile. | One of the {n} piles has [t/n=u] {x}. | 2 3 4 5
{He} shares them equally with friends, so that each of {n} children has the same. | Each of the {n} children has [t/n=u] {x}. | 2 3 4 5 6
"""

# t: how many there are at last
CLOSINGS = """
How many {x} does {a} have (now|in the end)? | In the end {a} has {t} {x}.
How many {x} are there now? | Now there are {t} {x}.
What is the number of {x} that {a} has at the end? | The number of {x} at the end is {t}.
"""

# numbers, question, solution; scenes with an empty line between them
SCENES = """
n:big m:big
{a} has {n} {x} and {b} has {m} {x}. They put all the {x} together in one big box. How many {x} are in the box?
{a} puts {n} {x} and {b} puts {m} {x} in the box.
Together there are [n+m=r] {x} in the box.

m:big d n=m+d
{a} picked {n} {x} at the {place}. {b} picked {m} {x} (there|on {day}). How many more {x} did {a} pick than {b}?
{a} picked {n} {x} and {b} picked {m} {x}.
So {a} picked [n-m=r] more {x} than {b}.

m:big d n=m+d
{a} wants to make {n} {x} for the {place}. {He} has already made {m} {x}. How many {x} does {he} still have to make?
{a} needs {n} {x} and has already made {m}.
{He} still has to make [n-m=r] {x}.

n:big m
{a} found {n} {x} (on {day}|last week). {b} found {m} more {x} than {a}. How many {x} did {b} find?
{a} found {n} {x}.
{b} found {m} more than {a}, which is [n+m=r] {x}.

m d n=m+d
{a} has {n} {x} (at home|in {his} bag). {b} has {m} fewer {x} than {a}. How many {x} does {b} have?
{a} has {n} {x}.
{b} has {m} fewer than {a}, which is [n-m=r] {x}.

n:big m:big
On {day} {a} sold {n} {x} at the {place}, and on {day2} {he} sold {m} {x}. How many {x} did {he} sell on the two days?
{a} sold {n} {x} on {day} and {m} {x} on {day2}.
On the two days {he} sold [n+m=r] {x}.

m:big d n=m+d
There are {n} {x} in the {place}. {m} of the {x} are red and the rest are blue. How many {x} are blue?
Of the {n} {x}, {m} are red.
The rest are blue, so [n-m=r] {x} are blue.

n:big m
{a} is {n} years old. {b} is {m} years older than {a}. How old is {b} (now|this year)?
{a} is {n} years old.
{b} is {m} years older, so {b} is [n+m=r] years old.

m:big d n=m+d
{a} goes to the {place} with ${n}. {He} spends ${m} on {x}. How many dollars does {a} have left?
{a} starts with ${n} and spends ${m} on {x}.
{He} has [n-m=r] dollars left.

n:big m:big
{a} walks {n} kilometers from home to the {place}. Then {he} walks {m} kilometers to see {b}. How many kilometers does {a} walk?
{a} walks {n} kilometers to the {place} and {m} kilometers to see {b}.
{He} walks [n+m=r] kilometers altogether.

n m
There are {n} {box} in the {place}. {a} puts {m} {x} in each of the {box}. How many {x} does {a} put in the {box}?
There are {n} {box} and each of them gets {m} {x}.
So {a} puts [n*m=r] {x} in the {box}.

n q t=n*q
{a} has {t} {x}. {He} shares the {x} equally among {n} friends at the {place}. How many {x} does each friend get?
{a} shares {t} {x} among {n} friends.
Each friend gets [t/n=r] {x}.

n m
One {one} costs ${m} (in the shop|at the market). {a} wants to buy {n} {x} for {b}. How many dollars does {a} need?
One {one} costs ${m} and {a} buys {n} {x}.
{He} needs [n*m=r] dollars.

n m
{a} earns ${m} an hour at the {place}. On {day} {he} works for {n} hours. How many dollars does {a} earn?
{a} works for {n} hours and earns ${m} an hour.
On {day} {he} earns [n*m=r] dollars.

n m
{b} has {m} {x}. {a} has {n} times as many {x} as {b}. How many {x} does {a} have?
{b} has {m} {x}.
{a} has {n} times as many, which is [n*m=r] {x}.

n m
{a} reads {n} pages of a book every day. {He} reads for {m} days (at home|in the library). How many pages does {a} read?
{a} reads {n} pages a day for {m} days.
That makes [n*m=r] pages.

n q t=n*q
A book has {t} pages. {a} reads {n} pages every day (after school|at home). How many days does {he} need to read the book?
The book has {t} pages and {a} reads {n} pages a day.
{He} needs [t/n=r] days.

n q t=n*q
{a} has {t} {x} and some {box}. {He} puts {n} {x} in each of them until no {x} are left. How many {box} does {a} fill?
{a} puts {t} {x} in {box} with {n} {x} each.
So {he} fills [t/n=r] {box}.

n m
In the {place} there are {n} rows of chairs. Each row has {m} chairs. How many people can sit in the {place}?
There are {n} rows with {m} chairs each.
So [n*m=r] people can sit in the {place}.

n q t=n*q
{a} pays ${t} for {n} {x} (in the shop|at the market). All {x} have the same price. How many dollars does one {one} cost?
{n} {x} cost ${t} together.
One {one} costs [t/n=r] dollars.

n:tiny m:tiny k c=n*m p=c+k
One {one} costs ${m}. {a} buys {n} {x} for {b} and pays with ${p}. How many dollars of change does {a} get?
{n} {x} cost [n*m=r] dollars.
{a} pays with ${p}, so the change is [p-r=s] dollars.

n:tiny m:tiny k:big
{a} buys {n} {x} for ${m} each. {He} also buys a box of {y} for ${k}. How many dollars does {a} spend?
The {x} cost [n*m=r] dollars.
With the box of {y} {a} spends [r+k=s] dollars.

n:big m
{a} has {n} {x}. {b} has {m} more {x} than {a}. How many {x} do {a} and {b} have together?
{b} has {m} more {x} than {a}, which is [n+m=r] {x}.
Together they have [n+r=s] {x}.

n:tiny m:tiny
{a} made {m} {x} on {day}. {b} made {n} times as many {x} as {a}. How many {x} did they make together?
{b} made {n} times as many {x} as {a}, which is [n*m=r] {x}.
Together they made [m+r=s] {x}.

n:tiny m:tiny k
{a} has {n} {box} with {m} {x} in each of them. {b} gives {him} {k} more {x}. How many {x} does {a} have now?
In the {box} there are [n*m=r] {x}.
{b} gives {k} more, so {a} has [r+k=s] {x}.

n:tiny m:tiny k
There are {n} {box} with {m} {x} each in the {place}. {a} takes {k} of the {x} home. How many {x} are left?
At first there are [n*m=r] {x}.
{a} takes {k} of them home, so [r-k=s] {x} are left.

k:tiny q:tiny m t=k*q n=t-m
{a} has {n} {x} and {b} has {m} {x}. They share all their {x} equally among {k} friends. How many {x} does each friend get?
Together {a} and {b} have [n+m=r] {x}.
Each of the {k} friends gets [r/k=s] {x}.

k:tiny q:tiny m t=k*q n=t+m
{a} has {n} {x}. {He} keeps {m} of them and puts the rest in {k} {box}, the same number in each. How many {x} are in one of the {box}?
{a} puts [n-m=r] {x} in the {box}.
With {k} {box} there are [r/k=s] {x} in each.

n:tiny m:tiny k
{a} works {n} hours at the {place} and earns ${m} an hour. Then {he} spends ${k} on {x}. How many dollars are left?
{a} earns [n*m=r] dollars.
After spending ${k} on {x}, {he} has [r-k=s] dollars.

n:tiny m:tiny k c=n*m p=c+k
{a} saves ${n} every week. {He} wants to buy a toy that costs ${p}. How many more dollars does {he} need after {m} weeks?
In {m} weeks {a} saves [n*m=r] dollars.
{He} needs [p-r=s] more dollars for the toy.

n:tiny k:tiny q:tiny d=q+k t=n*d
{a} puts {t} {x} in {n} {box}, the same number in each. Then {b} takes {k} {x} out of one of them. How many {x} are left in it?
Each of the {n} {box} gets [t/n=r] {x}.
{b} takes {k} out, so [r-k=s] {x} are left in it.

n m
The garden of {a} is {n} meters long and {m} meters wide. {a} walks once around the garden. How many meters does {he} walk?
One long side and one short side are [n+m=r] meters.
Around the garden {a} walks [r*2=s] meters.

n:big m k
In the {place} there are {n} people. At noon {m} people leave, and then {k} new people come. How many people are in the {place} now?
When {m} people leave, there are [n-m=r] people.
Then {k} come, so there are [r+k=s] people.

n:big m:big k
{a} ran {n} kilometers on {day} and {m} kilometers on {day2}. {b} ran {k} kilometers less than {a}. How many kilometers did {b} run?
{a} ran [n+m=r] kilometers on the two days.
{b} ran {k} less, which is [r-k=s] kilometers.

n m k j
{a} has {n} {box} with {m} {x} each. {b} has {k} {box} with {j} {x} each. How many {x} do they have together?
{a} has [n*m=r] {x}.
{b} has [k*j=s] {x}.
Together they have [r+s=t] {x}.

n m k j
{n} hens on the farm of {a} lay {m} eggs each. {a} uses {k} of the eggs and sells the rest for ${j} each. How many dollars does {a} get?
The hens lay [n*m=r] eggs.
{a} uses {k} of them, so [r-k=s] eggs are left.
At ${j} each {he} gets [s*j=t] dollars.

n:big m k
{a} has {n} {x}. {b} has {m} more {x} than {a}. {c} has {k} times as many {x} as {b}. How many more {x} does {c} have than {a}?
{b} has [n+m=r] {x}.
{c} has {k} times as many, which is [r*k=s] {x}.
So {c} has [s-n=t] more {x} than {a}.

n m k e=n*m f=e+k g:big p=f+g
A book has {p} pages. {a} reads {n} pages a day for {m} days, and on the next day {he} reads {k} pages. How many pages are left?
In {m} days {a} reads [n*m=r] pages.
With the next day {he} has read [r+k=s] pages.
So [p-s=t] pages of the book are left.

n k
{a} buys {k} {box} with {n} {x} in each. {He} gives all {n} {x} of one to {b} and shares the rest equally among {n} friends. How many {x} does each friend get?
{a} buys [k*n=r] {x}.
After giving {n} to {b}, [r-n=s] {x} are left.
Each of the {n} friends gets [s/n=t] {x}.

n m k e=n+m f=e*k g:big p=f+g
Every week {a} saves ${n} and {b} saves ${m}. They want to buy a boat that costs ${p}. How many more dollars do they need after {k} weeks?
In a week they save [n+m=r] dollars.
In {k} weeks they save [r*k=s] dollars.
They need [p-s=t] more dollars for the boat.

n m k j e=n*m f=k*j g=e+f d p=g+d
{a} buys {n} {x} for ${m} each and {k} {y} for ${j} each. {He} pays with ${p}. How many dollars of change does {a} get?
The {x} cost [n*m=r] dollars.
The {y} cost [k*j=s] dollars.
Together they cost [r+s=t] dollars.
The change is [p-t=u] dollars.

n m k j d
{a} works {n} hours a day at the {place} and earns ${m} an hour. After {k} days {he} buys {j} {x} for ${d} each. How many dollars are left?
In one day {a} earns [n*m=r] dollars.
In {k} days {he} earns [r*k=s] dollars.
The {x} cost [j*d=t] dollars.
So [s-t=u] dollars are left.

n m k
{a} made {m} {x} on {day}. {b} made {n} times as many {x}, and {c} made {k} more {x} than {b}. How many {x} did the three make together?
{b} made [m*n=r] {x}.
{c} made {k} more, which is [r+k=s] {x}.
{a} and {b} made [m+r=t] {x}.
The three made [t+s=u] {x} together.

n m k j d
In the {place} there are {n} {box} with {m} {x} each and {k} {box} with {j} {x} each. {a} takes {d} {x} home. How many {x} are left?
The first {box} hold [n*m=r] {x}.
The others hold [k*j=s] {x}.
Together they hold [r+s=t] {x}.
When {a} takes {d} of them home, [t-d=u] {x} are left.
"""
