"""The plots of the bundled model's stories: what can happen to a hero, what goes wrong, who helps and how it ends.

A plot is written as blocks of lines: a blank line separates the steps, and the lines of a step are its variants.
`{name}`, `{he}`, `{him}`, `{his}` and `{hero}` are the hero, `{obj}`, `{a_obj}` and `{the_obj}` the thing, `{fine}` and
`{a_fine}` the thing as it was asked for ("golden key"), `{a_helper}` and `{the_helper}` who helps; a capital letter
in a slot capitalizes what fills it. A step MEET stands for the ways to meet a helper.
"""

from typing import NamedTuple

Steps = tuple[tuple[str, ...], ...]


class Event(NamedTuple):
    """One kind of story: how it is asked for and told, as variants of its steps."""

    verb: str
    past: str
    deeds: tuple[str, ...]
    begins: Steps
    plots: tuple[Steps, ...]
    lessons: tuple[str, ...]


_MEET = """
Just then, {a_helper} came by.
After a while, {name} met {a_helper}.
Soon {a_helper} came to see what was the matter.
Then {a_helper} stopped and looked at {him}.
"""


def _steps(text: str) -> Steps:
    text = text.replace("MEET\n", _MEET.lstrip())
    return tuple(tuple(step.splitlines()) for step in text.strip().split("\n\n"))


def _event(verb: str, past: str, deeds: str, text: str) -> Event:
    """Return the event of a text: the begin, the plots and the lessons, each after a line with ---."""
    begins, *plots, lessons = (_steps(part) for part in text.split("---\n"))
    return Event(verb, past, tuple(deeds.split(" | ")), begins, tuple(plots), lessons[0])


_LOST = """
{Day}, {name} reached for {his} {fine}, but it was gone.
{Day}, {name} saw that {his} {fine} was missing.
{name} had {a_fine} and took it everywhere. But {day}, it was gone.
{Day}, {name} came home and saw that {he} had lost {his} {fine}.

{He} looked {spot} and {spot2}, but the {obj} was not there.
{He} searched {spot}. No {obj}! {He} searched {spot2}. No {obj}!
First {he} looked {spot}. Then {he} looked {spot2}. The {obj} was nowhere to be seen.
{name} turned everything upside down and even looked {spot}, but {he} could not find the {obj}.
---
MEET

"What are you looking for?" asked {the_helper}. "I have lost my {obj}," said {name}.
"Why do you look so sad?" asked {the_helper}. "My {obj} is gone," said {name}.

"I saw {a_obj} {find} today," said {the_helper}. "Come with me!"
"Something was lying {find}," said {the_helper}. "Let us go and see."

They went there together, and there it was: the {obj}!
{name} followed {the_helper}, and there was the {obj}, safe and sound.

{name} was so happy that {he} hugged the {obj} and then {the_helper}.
"Thank you!" said {name}, and {he} never lost the {obj} again.
From then on, {name} always put the {obj} back in its place.
---
MEET

"I have lost my {obj}," said {name}. "When did you last have it?" asked {the_helper}.
"My {obj} is gone," said {name}. "Think back. Where were you before?" asked {the_helper}.

{name} closed {his} eyes and thought. "I took a rest {find}!" {he} said.
{name} thought hard. "I was playing {find}!" {he} said.

They hurried back, and there lay the {obj}.
{He} went back at once, and {the_helper} came along. There was the {obj}, just where {he} had left it.

{name} took the {obj} in {his} arms and laughed. "How good that you asked me," {he} said to {the_helper}.
{name} carried the {obj} home and thanked {the_helper} with a big smile.
---
MEET

"Please help me find my {obj}," said {name}. Together they went on looking.
"Have you seen my {obj}?" asked {name}. "No, but I will help you look," said {the_helper}.

At last they found the {obj} {find}. A little {little_one} was sleeping next to it.
Then they saw the {obj} {find}. A little {little_one} was playing with it.

"It has no toys at all," whispered {the_helper}. {name} thought for a moment.
"Look how happy the {little_one} is," said {the_helper}. {name} thought for a moment.

"You may keep the {obj}," {he} said to the little {little_one}.
"It is yours now," said {name} and gave the {obj} to the little {little_one}.

{name} went home without the {obj}, but with a warm heart and a new friend.
{He} had lost {a_obj}, but {he} had found a friend, and that was even better.
---
MEET

"My {obj} is gone," said {name}. They both searched until the evening, but the {obj} stayed lost.
"I cannot find my {obj}," said {name}. {The_helper} helped to look for it, but they did not find it.

"Then we will make a new one," said {the_helper}. They worked all night by the light of the moon.
"Do not cry," said {the_helper}. "I will help you make a new {obj}." And they began at once.

The new {obj} was a little crooked, but {name} loved it even more than the old one.
The new {obj} was different, but {name} liked it, because a friend had made it with {him}.
---
Nothing is really lost when you have a friend.
Two find more than one.
It helps to stay calm and think back.
"""

_FOUND = """
{Day}, {name} found {a_fine} {find}.
{Day}, something was lying {find}. It was {a_fine}!
{Day}, {name} was on {his} way home when {he} saw {a_fine} {find}.

"Whose {obj} is this?" {he} wondered. {He} asked everyone {he} met, but nobody knew.
{name} wanted to keep the {obj}. "But somebody must miss it," {he} thought.
{name} waited a long time, but nobody came for the {obj}.
---
Then {name} heard somebody cry. It was {a_helper}.
On the way, {name} met {a_helper} who looked very sad.

"I have lost my {obj}," said {the_helper}. "It was a gift from my mother."
"I have looked everywhere for my {obj}," said {the_helper}. "I cannot sleep without it."

"Here it is!" said {name} and gave the {obj} back.
{name} smiled and held out the {obj}. "Is it this one?" {he} asked.

{The_helper} danced for joy. "You may use the {obj} whenever you like," said {the_helper}.
{The_helper} was so happy that {name} was invited to supper, and they put the {obj} on the table between them.
---
In the end, {he} showed the {obj} to {a_helper}.
Then {name} took the {obj} to {a_helper}.

"This is a wishing {obj}," said {the_helper}. "It will grant you one wish."
"Be careful," said {the_helper}. "There is magic in this {obj}. You have one wish."

{name} thought for a long time. "I wish that nobody has to be alone tonight," {he} said.
{name} did not wish for gold. "I wish for a big party for everyone," {he} said.

The {obj} began to glow, and from all sides friends came with lamps and songs.
There was a flash of light, and suddenly there was music, and everybody came to dance.

After that, the {obj} never glowed again, but {name} kept it all {his} life.
The magic was gone then, but {name} still loved the {obj}, for it had brought so much joy.
---
MEET

"I do not know what to do with this {obj}," said {name}.
"Nobody wants this {obj}," said {name}. "May I keep it?"

"Put it where all of us can enjoy it," said {the_helper}.
"Why do we not share it?" asked {the_helper}.

So they put the {obj} where everyone could see it, and the neighbors came to admire it.
So the {obj} belonged to both of them, one day to {name} and the next day to {the_helper}.

And whenever {name} saw the {obj}, {he} was glad that {he} had found it.
{name} had found {a_obj}, and now {he} had many friends as well.
---
What you share makes you twice as happy.
It is good to give back what you find.
"""

_WANTED = """
{name} had one big wish. {He} wanted {a_fine}.
More than anything else, {name} wanted {a_fine}.
{Day}, {name} saw {a_fine}, and from then on {he} wanted one too.

{He} wished for it in the morning and in the evening, but no {obj} came.
{He} counted {his} coins, but {a_obj} cost far too much.
{He} tried to make {a_obj} from sticks and string, but it fell apart at once.
---
MEET

"Help me clean my house," said {the_helper}, "and I will give you {a_obj}."
"I have {a_obj}," said {the_helper}. "Work with me for three days, and it is yours."

{name} worked hard and did not complain once.
It was hard work, but {name} did not stop until everything was done.

Then {the_helper} kept the promise, and {name} got the {obj} at last.
"Well done!" said {the_helper} and gave {him} the {fine}.

{name} was very proud, because {he} had earned the {obj} {himself}.
{He} took the {obj} home and looked at it until it was dark.
---
MEET

"What do you wish for?" asked {the_helper}. "{A_obj}," said {name}.
"I want {a_obj} so much," said {name}.

"I have one at home," said {the_helper}. "We can share it."
"You can have mine on Mondays," said {the_helper}, "and I will have it on Tuesdays."

They had so much fun with the {obj} that they met every day.
From that day on, the {obj} belonged to both of them.
---
{He} told {his} wish to {a_helper}.
Only {a_helper} knew about the wish.

The days went by. Then {name} had a birthday, and all the friends came.
Soon it was winter, and nobody talked about it any more. Then came {his} birthday.

"Close your eyes," said {the_helper}. When {name} opened them again, there was the {fine}!
{The_helper} brought a big parcel with a bow. In it was {a_fine}!

"You did not forget!" said {name} and held the {obj} tight.
{name} jumped for joy and let everyone try the new {obj}.
---
MEET

"What would you do with {a_obj}?" asked {the_helper}. "I would play with it and show it to my friends," said {name}.
"Why do you want {a_obj}?" asked {the_helper}. "So that somebody will play with me," said {name}.

"Then let us play now," said {the_helper}. "We do not need {a_obj} for that."
"I will play with you, even without {a_obj}," said {the_helper}.

They played until the stars came out and laughed all the time.
They played all day, and it was the best day of the year.

{name} still had no {obj}, but {he} had a friend.
And {name} did not think about the {obj} any more.
---
A wish is worth a little work.
A friend is the best thing to wish for.
"""

_BROKE = """
{Day}, {name} broke {a_fine}. It belonged to {a_helper}.
{Day}, {name} was playing with {a_fine} that belonged to {a_helper}. Crack! The {obj} broke.
{Day}, {name} visited {a_helper}. {He} picked up {a_fine}, but it slipped and broke.

{name} tried to put the {obj} together again, but the pieces did not hold.
{name} hid the pieces {spot}, but {he} could not stop thinking about the {obj}.
{He} wanted to say that the wind had broken the {obj}, but that was not true.
---
At last, {name} went to {the_helper}. "I broke your {obj}," {he} said. "I am so sorry."
In the end, {name} told {the_helper} everything. "The {obj} is broken, and it was me," {he} said.

"Thank you for telling me the truth," said {the_helper}. "Let us mend it together."
{The_helper} was quiet for a moment. "Come, we will mend it," said {the_helper} then.

They worked with glue and string until it was dark.
One of them held the pieces, and the other one glued them.

Then the {obj} was whole again, and you could hardly see the cracks.
In the evening, the {obj} was as good as new.
---
{name} took the pieces to {the_helper}. "Your {obj} is broken, and it is my fault," {he} said.
With a red face, {name} went to {the_helper} and told the truth about the {obj}.

"I am sad about the {obj}," said {the_helper}, "but I am glad that you told me."
"Oh, my {obj}!" cried {the_helper}. "But you are honest, and I like that."

{name} worked all week to earn some coins and bought {the_helper} a new {obj}.
The next day, {name} came back with a present. It was a new {obj} for {the_helper}.

{The_helper} was delighted, and they stayed friends.
{The_helper} hugged {him}, and the new {obj} got a very special place.
---
{name} showed the pieces to {the_helper}. "I am sorry that I broke your {obj}," {he} said.
Then {he} said to {the_helper}, "I broke your {obj}. Please do not be angry."

{The_helper} looked at the pieces. "How they shine in the sun!" said {the_helper}. "I have an idea."
{The_helper} had to smile. "The {obj} was old," said {the_helper}. "We will make something new from it."

They made a bright picture from all the pieces and hung it on the wall.
From the pieces, they made a little star that turned in the wind.

The {obj} was gone, but what they had made was even more beautiful.
Now it reminded them every day of the broken {obj} and of their friendship.
---
It is always better to tell the truth.
Everyone can break something, but not everyone can say sorry.
"""

_MADE = """
{Day}, {name} had an idea. "I will {verb} {a_fine}!" {he} said.
{name} had always wanted to {verb} {a_fine}. {Day}, {he} began.
{Day}, {name} {past} {a_fine}, but it was not easy.

The first {obj} was too small. The second {obj} was too crooked.
{He} worked very fast, and the {obj} fell apart.
{He} began at the wrong end, and it did not look like {a_obj} at all.
---
MEET

"Do not hurry," said {the_helper}. "Begin again, and do one thing at a time."
"May I help you?" asked {the_helper}. "My grandfather showed me how to {verb} {a_obj}."

{name} began again, slowly this time, and {the_helper} helped {him}.
So they worked together, and nobody was in a hurry.

When the sun went down, the {obj} was ready. It was the finest {obj} far and wide.
At last the {obj} was done, and it was just right.

"We did it!" cried {name}. {He} could not stop looking at the {obj}.
{name} was so proud of the {obj} that {he} showed it to everyone.
---
{He} wanted to give up, but {a_helper} said, "Try once more. I will call the others."
"I cannot do it alone," {he} said to {a_helper}. "Then do it with us!" said {the_helper}.

Everyone who lived nearby came and helped a little.
The neighbors came from all sides, and each of them had a good idea.

By evening, the {obj} was finished, and it was much better than {name} had dreamed.
One did this and one did that, and soon the {obj} was finished.

"This is not my {obj}," said {name}. "It is our {obj}."
And because all had helped, the {obj} belonged to all of them.
---
But {name} tried again and again, and in the end {he} had a fine {obj}.
So {name} tried a third time, and this time the {obj} was perfect.

Then {he} saw {a_helper} sitting alone {find}.
On the same day, {he} met {a_helper} who had a birthday, but no presents.

"I never had {a_obj}," said {the_helper} with a sigh.
"What a lovely {obj}!" said {the_helper}. "I wish I had one too."

"It is for you," said {name} and gave the {obj} away. "I can {verb} another one."
{name} did not think twice. "Take it," {he} said. "I know now how to {verb} {a_obj}."

{The_helper} was so happy that {name} was happy too.
The eyes of {the_helper} shone, and that was better than any {obj}.
---
If it does not work at first, try again.
Many hands make light work.
"""

_BORROWED = """
{Day}, {name} borrowed {a_fine} from {a_helper}. "Bring it back before dark," said {the_helper}.
{Day}, {name} asked {a_helper} for {a_fine}. "You may borrow it until tonight," said {the_helper}.

{name} had so much fun with the {obj} that {he} forgot the time. Suddenly it was dark.
But on the way home, the {obj} fell into the mud and got very dirty.
{name} put the {obj} down {spot}, and then {he} could not remember where it was.
---
{He} did everything to set it right, and in the end {he} brought the {obj} back, clean and dry.
In the end, {he} stood at the door with the {obj}, and it was clean and shiny.

"I am sorry that I am late," said {name}. "I was not careful with your {obj}."
"I almost lost it," said {name}. "Please do not be angry about the {obj}."

"You came back, and that is what counts," said {the_helper}.
"Thank you for telling me," said {the_helper}. "You may borrow the {obj} again."

{name} was glad and ran home under the stars.
From then on, {name} took good care of everything that {he} borrowed.
---
{name} was afraid that {the_helper} would be angry, so {he} picked some flowers.
{name} did not dare to go back with empty hands, so {he} baked a small cake.

Then {he} brought the {obj} back. "This is for you, because you had to wait," {he} said.
Then {he} took the {obj} to {the_helper}. "Here is your {obj}, and here is a present," {he} said.

{The_helper} laughed. "You can borrow my {obj} every day if you are so kind!"
"How nice of you!" said {the_helper}. "Next time we will use the {obj} together."

And that is what they did, every Sunday afternoon.
And so {a_obj} made two good friends.
---
What you borrow, you must bring back.
Take good care of what belongs to a friend.
"""

_STOLE = """
{Day}, {name} saw {a_fine} that belonged to {a_helper}. When nobody was looking, {he} {past} it.
{Day}, {name} came by the house of {a_helper}. There was {a_fine} in the window, and {he} {past} it.

{He} hid the {obj} {spot}, but {he} could not enjoy it.
That night, {name} could not sleep. The {obj} seemed to look at {him}.
At first {he} was glad, but then {he} heard that {the_helper} was very sad about the {obj}.
---
The next morning, {name} went to {the_helper}. "I {past} your {obj}," {he} said. "I am sorry."
At last, {name} brought the {obj} back. "I {past} it," {he} said in a small voice.

{The_helper} looked at {him} for a long time. "It was wrong to take it," said {the_helper}, "but you came back."
"That was not nice," said {the_helper}. "But it is good that you brought it back."

Then {the_helper} smiled again. "If you want to use my {obj}, you only have to ask."
Then {the_helper} opened the door wide. "Come in. We can look at the {obj} together."

{name} felt light again, and {he} never took anything without asking again.
So {name} lost {a_obj} and found a friend.
---
Then {he} heard {the_helper} cry. "My {obj} was all I had from my grandmother!"
In the street, {he} met {the_helper}. "My {obj} is gone," said {the_helper} and began to cry.

{name} felt hot with shame. That night, {he} put the {obj} back in front of the door.
{name} ran home, fetched the {obj} and put it into the arms of {the_helper}. "It was me," {he} said.

"Now my heart is light again," said {the_helper} and hugged the {obj}.
"I am so glad to have it back," said {the_helper}. "Do not do that again."

{name} promised it, and {he} kept {his} promise.
From that day on, {name} helped {the_helper} every week, to make it good.
---
What you take in secret brings no joy.
It is never too late to put things right.
"""

_DREAMED = """
One night, {name} dreamed of {a_fine}. It was shining like the moon.
One night, {name} had a wonderful dream. In the dream, {he} had {a_fine}.

In the morning, {he} looked {spot}, but there was no {obj}.
When {he} woke up, the {obj} was gone, and {he} missed it.
"It was only a dream," said everyone, but {name} could not forget the {obj}.
---
MEET

"I dreamed of {a_obj}," said {name}. "Where was it in your dream?" asked {the_helper}.
"Tell me about your dream," said {the_helper}. "Where did you see the {obj}?"

"It was {find}," said {name}. So they went there to look.
"I saw it {find}," said {name}. "Then let us go there," said {the_helper}.

And there, in the morning light, was {a_fine}, just like in the dream!
They looked carefully, and really, there was the {obj} from the dream.

{name} laughed. "Some dreams come true," {he} said and took the {obj} home.
{He} put the {obj} beside {his} bed, so that {he} could see it when {he} woke up.
---
So {name} drew a picture of the {obj} and hung it up.
So {name} told the dream to everyone who wanted to hear it.

{A_helper} heard about the {obj} and had an idea.
{A_helper} listened closely and asked what the {obj} looked like.

"We can make it ourselves," said {the_helper}. They began that same day.
"I am good at making things," said {the_helper}. "I will help you make {a_obj}."

After a week, {name} had {a_fine}, and it was even nicer than the one in the dream.
Soon the {obj} was ready, and it shone just like in the dream.
---
What you can dream, you can do.
It is good to tell a friend about your dreams.
"""

_AFRAID = """
There was only one thing that {name} was afraid of, and that was {a_fine}.
{name} had a secret. {He} was afraid of {a_fine}.
But when it came to {a_fine}, {name} was very much afraid.

{He} only had to think of {the_obj}, and {his} knees began to shake.
{Day}, {he} hid {spot} because of {the_obj}, but {he} was still afraid.
{He} went a long way round so that {he} did not come near {the_obj}.
---
MEET

"Why are you shaking?" asked {the_helper}. "I am afraid of {the_obj}," said {name}.
"What is wrong?" asked {the_helper}. "It is {the_obj}," whispered {name}. "I am so afraid."

"I was once afraid of it too," said {the_helper}. "Come, we will go and look at it together."
"Give me your hand," said {the_helper}. "We will go there step by step."

They went closer and closer. {The_obj} did nothing bad at all.
With every step, {name} was a little less afraid, and {the_obj} was not so terrible after all.

"Is that all?" asked {name} and laughed. And {he} was never afraid of {the_obj} again.
After that, {name} even began to like {the_obj} a little.
---
MEET

"I am afraid of {the_obj}," said {name}. "Then say hello to it," said {the_helper}.
"Nobody is as afraid of {the_obj} as I am," said {name}. "Try to sing to it," said {the_helper}.

{name} thought that this was strange, but that evening {he} tried it in a very small voice.
It sounded silly, but {name} tried it, first softly and then louder.

Nothing bad happened. {name} tried it the next day too, and the day after.
And really, the fear became smaller and smaller, until it was as small as a pea.

In the end, {name} was not afraid of {the_obj} any more.
"Good night," {he} now says to {the_obj} every evening.
---
{Day2}, {name} heard a cry for help. It was {a_helper}, and {the_obj} was very near.
Then something happened. {A_helper} was in trouble, and the only way there led past {the_obj}.

{name} was afraid, but {he} went on. "I am coming!" {he} called.
{His} heart beat fast, but {name} closed {his} eyes and went past {the_obj}.

{He} reached {the_helper} and helped {the_helper} to get home.
{He} took {the_helper} by the hand, and they came home safely.

"You were not afraid of {the_obj}!" said {the_helper}. "I was," said {name}, "but I wanted to help you."
Only then {he} saw that {he} had forgotten to be afraid of {the_obj}.
---
To be brave is to be afraid and to go on.
Together you are less afraid.
"""

_HID = """
{Day}, {name} hid {a_fine} {spot}. Nobody was to see it.
{Day}, {name} took {his} {fine} and hid it {spot}.

{He} had to guard the {obj} all day long and had no time to play.
{He} went to look at it ten times a day, but it was no fun to look at the {obj} alone.
---
MEET

"What are you hiding there?" asked {the_helper}. "My {obj}," said {name}. "Nobody may take it."
"Why do you never come and play?" asked {the_helper}. "I must guard my {obj}," said {name}.

"But nobody can enjoy it there," said {the_helper}, "not even you."
"I do not want to take it," said {the_helper}. "I only want to play with you."

{name} thought about it. Then {he} took out the {obj} and showed it to {the_helper}.
That was true. So {name} fetched the {obj} and put it on the table for all to see.

It was much more fun with two, and {name} never hid the {obj} again.
They had a wonderful afternoon, and the {obj} was never hidden again.
---
MEET

"What is your secret?" asked {the_helper}. "I cannot tell you yet," said {name} and smiled.
"You are hiding something," said {the_helper}. "Wait until tomorrow," said {name}.

The next day was the birthday of {the_helper}, and {name} came with the {obj} and a song.
For the next day was a special day. {name} fetched the {obj} and put a red bow on it.

"Happy birthday!" said {name}. "The {obj} is for you. That is why I hid it."
"Surprise!" said {name}. "I hid the {obj} because it is a present for you."

{The_helper} had never been so surprised and so happy.
{The_helper} laughed, and together they danced around the {obj}.
---
What you hide makes nobody happy.
A good secret is one that you can share.
"""

_PLANTED = """
{Day}, {name} planted {a_fine} {find}.
{Day}, {name} dug a little hole {find} and planted {a_fine} in it.

{He} watered it every morning, but nothing happened.
{He} sang to it and waited, but not one green leaf came.
"Nothing will grow from {a_obj}," said the others and laughed.
---
MEET

"I planted {a_obj}, but it does not grow," said {name}.
"Why do you sit here?" asked {the_helper}. "I am waiting for my {obj} to grow," said {name}.

"Good things need time," said {the_helper}. "Give it sun, water and a kind word."
"You must not give up," said {the_helper}. "I will help you water it."

{name} waited and cared for it. And one morning, there was a tiny green leaf.
Then came the rain, and then came the sun. And there it was, a little green leaf!

It grew and grew, and in summer there stood a beautiful tree, all from one {obj}.
In summer, it was taller than the house and full of flowers, and it had all begun with {a_obj}.

{name} and {the_helper} sat in its shade and were happy.
Birds came to live in it, and {name} told everyone about the {obj}.
---
MEET

"What did you plant?" asked {the_helper}. "{A_obj}," said {name}.
"I planted {a_obj}," said {name}, "and now I want to give up."

"Here is some magic water," said {the_helper}. "Try it tonight."
"Wait until the moon is full," said {the_helper}. "Then you will see."

That night, something rustled. In the morning, there was a tree, and on every branch hung {a_obj}!
And when the next morning came, there stood a tree, and on every branch there was {a_obj}.

{name} called all the neighbors, and each of them got {a_obj} to take home.
{name} picked one {obj} for {the_helper} and one for every friend.
---
Good things take time.
Big things grow from small beginnings.
"""

_SOLD = """
{Day}, {name} went to the market and sold {his} {fine} to {a_helper} for three coins.
{Day}, {name} needed money, so {he} sold {his} {fine} to {a_helper}.

{He} bought a cake, but the cake was soon eaten, and {he} missed the {obj}.
At home, it was empty and quiet without the {obj}, and {he} was sorry that {he} had sold it.
---
The next day, {name} went back. "Please, may I have my {obj} again?" {he} asked {the_helper}.
"I miss my {obj} so much," {name} said to {the_helper} the next day.

"I like the {obj} too," said {the_helper}. "But you can come and visit it every day."
"Help me sweep my yard," said {the_helper}, "and you shall have the {obj} back."

{name} was glad to do so, and soon the two were laughing together.
{name} agreed at once, and it was more fun than {he} had thought.

And {he} never sold anything that {he} loved again.
{He} had sold {a_obj} and got a friend for it. That was a good trade.
---
"Why did you sell the {obj}?" asked {the_helper} a few days later. {name} looked at the ground.
A few days later, {the_helper} came to visit. "You look sad," said {the_helper}. "Is it because of the {obj}?"

"I needed money for a present for my sick mother," {he} said.
"Yes," said {name}. "I wanted to buy medicine for my mother."

{The_helper} went out and came back with the {obj}. "Then this is my present for you," said {the_helper}.
"You have a good heart," said {the_helper}. "Take the {obj} back. I do not need it."

{name} was so happy that {he} could not speak. {He} only held the {obj} tight.
That evening, {name} and {his} mother looked at the {obj} and smiled.
---
Some things are worth more than coins.
Think twice before you sell what you love.
"""

_GAVE = """
{Day}, {name} met {a_helper} who was cold and sad. So {he} gave away {his} {fine}.
{Day}, {name} saw {a_helper} who had nothing at all. "Take this," said {name} and gave away {his} {fine}.

Without the {obj}, it was empty at home, and {name} missed it a little.
"How foolish to give away your {obj}!" said the others. {name} went home with empty hands.
---
Some weeks later, there was a knock at the door. It was {the_helper} with a big smile.
When winter came, {name} got lost in the snow. Suddenly {the_helper} stood there with the {obj}.

"Your {obj} brought me luck," said {the_helper}. "Now I want to help you."
"You helped me, and now I will help you," said {the_helper}.

They sat by the fire together, drank hot tea and told stories until late at night.
{The_helper} took {name} home and stayed for supper, and they laughed until late at night.

{name} had given away {a_obj} and got a friend for life.
And the {obj} had made them both happy.
---
The next day, {he} came by and saw {the_helper} with the {obj}. {The_helper} was singing.
Soon after, {he} saw {the_helper} again. The {obj} was clean and shiny and had the best place of all.

"I have never had anything so beautiful," said {the_helper}. "Thank you for the {obj}!"
"Since I have the {obj}, I am not sad any more," said {the_helper}.

Then {name} felt warm inside, and {he} did not miss the {obj} any more.
When {name} heard that, {he} was happier than ever before.
---
Whoever gives gets something back.
Giving can make you happier than having.
"""

_BOUGHT = """
{Day}, {name} went to the market and bought {a_fine} from {a_helper}.
{Day}, {name} took all {his} coins and bought {a_fine} from {a_helper}.

But at home, {he} did not know what to do with {a_obj}.
{He} carried the {obj} home, but nobody wanted to look at it.
On the way home, {he} thought of {his} empty pockets. Now there was no money left for bread.
---
So {name} went back to {the_helper}. "Was it a mistake to buy the {obj}?" {he} asked.
The next day, {name} met {the_helper} again. "I am not happy with the {obj}," {he} said.

"It is no common {obj}," said {the_helper}. "It only brings joy when you share it."
"You must show it to somebody who is sad," said {the_helper}. "Then you will see."

So {name} gave the {obj} to a little {little_one} to play with, and the {little_one} laughed and laughed.
So {name} took the {obj} to a little {little_one} who was ill, and soon the {little_one} smiled again.

Then {name} knew that {he} had bought the right thing.
"This {obj} was worth every coin," said {name}.
---
"Can I give the {obj} back?" {name} asked {the_helper} the next day.
{name} sat down with the {obj} and sighed. Then {the_helper} came by.

"I have a better idea," said {the_helper}. "Let us show it to everyone and ask for a slice of bread."
"Do not worry," said {the_helper}. "I made some soup, and the {obj} can stand on the table."

So they did, and it was a merry evening with good food and a lot of guests.
They ate and talked, and everyone liked the {obj}.

{name} never wanted to give the {obj} back after that.
And every time {name} saw the {obj}, {he} thought of that evening.
---
Things are nicer when you share them.
"""

_MET = """
{Day}, {name} met {a_fine} {find}.
{Day}, {a_fine} was sitting {find}. That is how the two met.
{Day}, {name} heard a noise. {A_fine} was standing {find}.

At first, they did not know what to say. They just looked at each other.
{name} had never met {a_obj} before and did not know if {he} could trust the {obj}.
"Go away!" said the {obj}. "I want to be alone." That made {name} sad.
---
Then a cold wind began to blow. "Come under my blanket," said {name} to the {obj}.
Suddenly a big storm came up. "Quick, we must hide!" called {name}. The {obj} came along.

They sat close together and told each other stories until the wind was still again.
While they waited, they found out that they both liked pancakes and songs.

"I thought you were mean," said the {obj}. "And I thought you were scary," said {name}. They both laughed.
"Shall we meet again tomorrow?" asked the {obj}. "Yes!" said {name}.

From that day on, {name} and the {obj} met every day.
And so {name} and the {obj} became best friends.
---
On the way home, {name} slipped and got stuck between two big stones. "Help!" {he} called.
Then {name} saw that the {obj} had lost the way and was crying.

Soon they were helping each other, and nobody was afraid any more.
"Let us help each other," they said at the same time, and they had to laugh.

The {obj} was strong, {name} was quick, and together they found the way home.
It took until evening, but then {name} and the {obj} were both safe.

"You are a real friend," said {name}. "So are you," said the {obj}.
Since then, nobody has seen {name} without the {obj}.
---
{name} took out some bread and broke it in two. "Half of it is for you," {he} said.
"Do you want to play with me?" asked {name} after a while.

The {obj} smiled for the first time. "Nobody was ever so nice to me," said the {obj}.
"I would love to," said the {obj}, "but nobody has ever asked me."

They shared everything and played until the moon came up.
All afternoon, they ran and laughed and played hide and seek.

When {name} came home that night, {he} was glad that {he} had met the {obj}.
Now {name} had a friend, and the {obj} had a friend too.
---
A stranger is a friend you do not know yet.
A kind word opens every door.
"""

_LEARNED = """
{name} had one big wish. {He} wanted to {obj}.
All the others could {obj}, but {name} could not.
{Day}, {name} made up {his} mind. "I want to {obj}!" {he} said.

{He} tried to {obj} from morning to evening, but it did not work.
{He} tried once and failed. {He} tried again and fell on {his} nose.
"You will never {obj}," laughed the others. "That is too hard for you."
---
MEET

"I want to {obj}, but I cannot do it," said {name}.
"Why are you so sad?" asked {the_helper}. "Because I cannot {obj}," said {name}.

"I can teach you," said {the_helper}. "Nobody can {obj} on the first day."
"You only need to practice," said {the_helper}. "I will show you how."

They practiced every day, first a little and then a little more.
{The_helper} showed {him} one small step after the other.

And one day, {name} could {obj}! Everyone came to watch.
After many days, {name} began to {obj}, and {the_helper} clapped and cheered.

"I can {obj}!" cried {name}. It was the best day of {his} life.
"Look at me!" called {name}, and {he} did not want to stop.
---
MEET

"Will you help me?" asked {name}. "I want to learn to {obj}."
"I have tried everything," said {name}, "and I still cannot {obj}."

"Do it in your own way," said {the_helper}. "You do not have to do it like the others."
"You are afraid to fail," said {the_helper}. "Close your eyes and laugh. Then try."

{name} closed {his} eyes and tried it once more, slowly and quietly.
{name} laughed, forgot about all the others and tried again.

And suddenly {he} could {obj}! It looked a little funny, but it worked.
It did not look like the others, but there was no doubt that {name} could {obj}.

Now the others wanted to {obj} like {name}.
Nobody laughed any more. "Please show us how you {obj}," they said.
---
Never give up too soon.
Practice makes perfect.
It is all right to do things in your own way.
"""

_LOSE = "lost {a_fine} | lost {a_fine} | lost {his} {fine} | could not find {his} {fine}"
_MAKE = "{past} {a_fine} | {past} {a_fine} | wanted to {verb} {a_fine}"
_LEARN = "wanted to {obj} | learned to {obj} | wanted to learn to {obj} | could not {obj}"

EVENTS = {
    "lost": _event("lose", "lost", _LOSE, _LOST),
    "found": _event("find", "found", "found {a_fine} | found {a_fine} | discovered {a_fine}", _FOUND),
    "wanted": _event("want", "wanted", "wanted {a_fine} | wished for {a_fine} | needed {a_fine}", _WANTED),
    "broke": _event("break", "broke", "broke {a_fine}", _BROKE),
    "made": _event("make", "made", _MAKE, _MADE),
    "built": _event("build", "built", _MAKE, _MADE),
    "baked": _event("bake", "baked", _MAKE, _MADE),
    "borrowed": _event("borrow", "borrowed", "borrowed {a_fine}", _BORROWED),
    "stole": _event("steal", "stole", "stole {a_fine}", _STOLE),
    "took": _event("take", "took", "took {a_fine}", _STOLE),
    "dreamed of": _event("dream of", "dreamed of", "dreamed of {a_fine} | dreamed about {a_fine}", _DREAMED),
    "was afraid of": _event("fear", "feared", "was afraid of {a_fine} | was scared of {a_fine}", _AFRAID),
    "hid": _event("hide", "hid", "hid {a_fine} | hid {his} {fine}", _HID),
    "planted": _event("plant", "planted", "planted {a_fine}", _PLANTED),
    "sold": _event("sell", "sold", "sold {a_fine} | sold {his} {fine}", _SOLD),
    "gave away": _event("give away", "gave away", "gave away {a_fine} | gave away {his} {fine}", _GAVE),
    "bought": _event("buy", "bought", "bought {a_fine}", _BOUGHT),
    "met": _event("meet", "met", "met {a_fine}", _MET),
    "learned to": _event("learn to", "learned to", _LEARN, _LEARNED),
}
