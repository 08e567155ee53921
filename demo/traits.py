"""Sentences that show why a brave hero is brave, for each adjective that a story can be requested with."""

from typing import NamedTuple


class Trait(NamedTuple):
    """Ways to show a trait at the beginning, how it shows in trouble, and what is said at the end."""

    shows: tuple[str, ...]
    trouble: str
    end: str


# A block: the adjective, two sentences that show it, one for the trouble, one for the end.
_BLOCKS = """
brave
{He} was not afraid of the dark, of deep water or of loud storms.
{He} always went first when the others did not dare.
But {name} was brave. {He} took a deep breath and held {his} head high.
Everyone agreed that there was no {hero} as brave as {name}.

shy
{He} spoke so softly that hardly anyone could hear {him}.
When visitors came, {he} hid behind the curtain.
{name} was too shy to talk about it with anyone.
{name} was still a little shy, but not with friends.

sleepy
{He} yawned all day long and could fall asleep anywhere.
{He} took a nap after breakfast, a nap after lunch and a nap before bed.
This made {name} so tired that {he} had to take a little nap first.
Then {name} yawned, curled up and fell asleep with a smile.

curious
{He} looked into every hole and asked a hundred questions a day.
{He} always wanted to know how things worked.
"There must be an answer," thought the curious {hero}.
And the next day, {name} had a hundred new questions.

greedy
{He} always wanted the biggest piece and never shared.
Whatever {he} saw, {he} wanted to have it all.
"I want everything for me alone," grumbled the greedy {hero}, but it did not help.
After that, {name} was not so greedy any more and learned to share.

tiny
{He} was so tiny that {he} could sleep in a teacup.
{He} was no bigger than a thumb.
"I am too tiny for such a big problem," {he} sighed.
"I may be tiny," said {name}, "but I can do big things."

small
{He} was smaller than all the others, and they often did not see {him}.
{He} had to stand on a box to look out of the window.
"Nobody listens to someone so small," thought {name}.
Nobody ever said again that {name} was too small.

little
{He} had little feet, little ears and a very big heart.
{He} was the youngest of seven.
"What can a little {hero} like me do?" {he} asked.
And the little {hero} felt very big that night.

big
{He} was so big that the ground shook when {he} walked by.
{He} was bigger than anyone else, but {he} had a soft heart.
"I am so big, and still I do not know what to do," said {name}.
The big {hero} smiled a very big smile.

clever
{He} could solve any riddle and knew a lot of tricks.
When others had a problem, they came to {name}.
The clever {hero} thought and thought about a plan.
"Even a clever {hero} can learn something new," said {name}.

lazy
{He} liked to lie in the sun and do nothing at all.
"I will do it tomorrow," was what {he} said every day.
{name} wanted to lie down and do nothing, but that did not help this time.
After so much work, the lazy {hero} rested for three whole days.

grumpy
{He} never said good morning and did not like to laugh.
{He} grumbled about the rain, and {he} grumbled about the sun.
"Everything always goes wrong," grumbled {name}.
And for the first time in years, the grumpy {hero} laughed out loud.

happy
{He} sang from morning to night and smiled at everyone.
{He} could laugh about almost anything.
Even the happy {hero} stopped singing for a while.
Soon {name} was singing again, louder than ever.

sad
{He} had not laughed for a long time.
{He} often sat alone and looked at the clouds.
A big tear rolled down the nose of the sad {hero}.
And {name} was not sad any more.

lonely
{He} had nobody to talk to and ate {his} supper alone.
Every evening, {he} wished for a friend.
"If only I had a friend to help me," sighed the lonely {hero}.
And {name} was never lonely again.

kind
{He} always had a good word for everyone.
{He} fed the birds in winter and helped everyone carry heavy bags.
Even now, the kind {hero} did not say one angry word.
"Whoever is kind finds friends everywhere," they all said.

friendly
{He} greeted everyone with a big smile.
{He} knew the names of all the neighbors.
"A friend will know what to do," thought the friendly {hero}.
The friendly {hero} had made one more friend.

silly
{He} wore a pot as a hat and walked backwards on Tuesdays.
{He} told jokes that nobody understood, and laughed at them {himself}.
The silly {hero} stood on {his} head to think, but no idea came.
Then the silly {hero} put a pot on {his} head and danced.

funny
{He} could make funny faces, and everyone laughed.
{He} knew more jokes than anyone else.
{name} tried to make a joke about it, but nobody laughed this time.
"What a funny day!" laughed {name}.

clumsy
{He} often tripped over {his} own feet.
Cups fell down wherever {he} went.
And because {he} was clumsy, {name} tripped and landed in the mud.
The clumsy {hero} jumped for joy and tripped one last time.

careful
{He} looked left and right before every step.
{He} checked everything three times.
"Slowly, slowly," said the careful {hero}. "I must make no mistake."
"It is good to be careful," said {name}, "but it is also good to try."

proud
{He} held {his} head up high and never asked for help.
{He} thought that {he} was better than all the others.
The proud {hero} did not want to ask anyone for help.
"It is no shame to need help," said the proud {hero} at last.

old
{His} hair was grey, and {his} back hurt when it rained.
{He} had seen a hundred summers and told wonderful stories.
"I am too old for this," sighed {name}.
"One is never too old for something new," said {name}.

wise
{He} had read many books and spoke only when it mattered.
Everyone came to {him} for advice.
Even the wise {hero} had no answer this time.
"Today I learned something too," said the wise {hero}.

foolish
{He} once tried to catch the moon in a bucket.
{He} believed everything that {he} was told.
The foolish {hero} waited for the problem to go away by itself, but it did not.
"I was foolish, but now I know better," said {name}.

angry
{He} often stamped {his} feet and shouted.
When something went wrong, {his} face turned as red as a tomato.
{name} was so angry that {he} kicked a stone and hurt {his} toe.
{name} was not angry any more, and it felt good.

hungry
{He} ate five meals a day, and {his} stomach still rumbled.
{He} thought of pancakes from morning to night.
{name} was so hungry that {he} could hardly think.
Then they all ate pancakes until even {name} was full.

poor
{He} had only one coat and one old pot.
{He} often had nothing but soup for supper.
"I have no money and nobody to help me," said the poor {hero}.
{name} was still poor, but {he} felt rich.

rich
{He} had a hundred gold coins and a house full of fine things.
{He} ate from golden plates every day.
The rich {hero} offered all {his} gold, but gold could not help.
"The best things cannot be bought," said the rich {hero}.

strong
{He} could carry a whole tree on one shoulder.
{He} was so strong that {he} could lift a cow.
But being strong did not help {him} this time.
"A good heart is stronger than strong arms," said {name}.

quiet
{He} liked to listen to the wind and did not talk much.
{He} moved so softly that nobody heard {him} come.
The quiet {hero} sat down and did not say a word.
The quiet {hero} said nothing, but {his} eyes were shining.

loud
When {he} laughed, the windows shook.
{He} could not whisper, even at night.
"Oh no!" shouted {name} so loudly that the birds flew away.
"Hooray!" shouted {name}, and everyone for miles around could hear it.

busy
{He} worked from early morning until late at night.
{He} had a long list of things to do every day.
"I have no time for this," said the busy {hero}, but {he} could think of nothing else.
And for once, the busy {hero} sat down and did nothing at all.

patient
{He} could wait for hours without a word.
{He} once watched a flower until it opened.
The patient {hero} sat down and waited quietly.
"Good things come to those who wait," said the patient {hero}.

stubborn
When {he} had made up {his} mind, nobody could change it.
{He} never did what {he} was told.
"I will not give up," said the stubborn {hero} and stamped {his} foot.
Sometimes it is good to be as stubborn as {name}.

gentle
{He} never stepped on a flower and never woke a sleeping bird.
{He} had soft hands and a soft voice.
The gentle {hero} wiped away a tear.
Everyone loved the gentle {hero} even more after that day.

honest
{He} had never told a lie in {his} life.
{He} always told the truth, even when it was hard.
"I must be honest, even now," thought {name}.
Everyone knew that they could trust the honest {hero}.

cheerful
{He} whistled all day and never stayed sad for long.
{He} found something good in every rainy day.
"Tomorrow will be better," said the cheerful {hero} and whistled a song.
The cheerful {hero} whistled all the way home.

forgetful
{He} often put on two different shoes.
{He} forgot birthdays, names and sometimes {his} own supper.
"What did I want to do?" asked the forgetful {hero}. It took a while to remember.
The forgetful {hero} forgot many things, but never this day.

naughty
{He} put salt in the sugar and laughed.
{He} played tricks on everybody in the neighborhood.
For once, the naughty {hero} was not in the mood for tricks.
{name} promised to play no more tricks, at least until Monday.

young
{He} had so much to learn and could not wait to grow up.
{He} had just lost {his} first tooth.
"I am too young to know what to do," said {name}.
{name} felt quite grown up that day.

magical
When {he} sneezed, little stars flew out of {his} nose.
{He} could make flowers grow with a snap.
{name} tried a magic spell, but only a puff of smoke came out.
"Friends are the best magic of all," said the magical {hero}.

worried
{He} worried about the weather, about the soup and about tomorrow.
{He} could not sleep at night because {he} thought too much.
"What if it all goes wrong?" asked the worried {hero}.
That night, {name} slept well and did not worry at all.

polite
{He} always said please and thank you, even to the trees.
{He} bowed to everyone {he} met.
"Excuse me, I do not know what to do," said the polite {hero} to nobody at all.
"Thank you very, very much," said the polite {hero} and bowed.
"""


def _traits() -> dict[str, Trait]:
    blocks = (block.splitlines() for block in _BLOCKS.strip().split("\n\n"))
    return {adjective: Trait((first, second), trouble, end) for adjective, first, second, trouble, end in blocks}


TRAITS = _traits()

# For any other adjective.
PLAIN = Trait(
    (
        "There was no other {adjective} {hero} far and wide.",
        "Everyone knew the {adjective} {hero} and waved when {he} came by.",
        "{name} was the only {adjective} {hero} that anyone had ever seen.",
        '"Look, the {adjective} {hero}!" called the children whenever {he} came by.',
    ),
    "The {adjective} {hero} sat down and sighed.",
    "Everyone still talks about the {adjective} {hero} today.",
)
