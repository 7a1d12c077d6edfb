"""The grammar of the generated utterances: nothing but data.

A line ``name = a | b`` gives the phrases of a name, ``name: a b`` those of one word. ``<name>`` stands for any of them,
``{type}`` or ``{type:name}`` for a slot of that type with such a phrase as its value. A template that ends in ? or . is
a question or a statement and takes no "could you"; the sign itself is not said. Many words are meant to be ambiguous:
will, may, mark and rose are people too, titles hold names and times, and messages all of them.
"""

from __future__ import annotations

import re
from itertools import product

_ENTRY = re.compile(r"^(\w+)( =|:)(.*(?:\n .*)*)", re.MULTILINE)


def entries(text: str) -> dict[str, list[str]]:
    """What the lines say; one that begins with a blank goes on with the line before."""
    found: dict[str, list[str]] = {}
    for name, sign, values in _ENTRY.findall(text):
        if sign == ":":
            found[name] = values.split()
        else:
            found[name] = [" ".join(phrase.split()) for phrase in values.split("|")]
    return found


def joined(*columns: str) -> list[str]:
    """Every way to join one piece of each column to a word."""
    pieces = [column.split() for column in columns]
    return ["".join(chosen) for chosen in product(*pieces)]


_MADE_UP = {
    "large": [str(number) for number in (*range(11, 100), *range(100, 1001, 50))],
    "last": joined(
        "ash black brook fair green hart holl hazel kings lang mill north oak red sand stan thorn under wake west win",
        "berg bridge by combe field ford ham land ley man mere son stead ton wick wood worth",
    ),
    "medicine": joined(
        "ali bexo cora dexa elo fluva gali hydro iva keto lora meto neu oxa pira",
        "ba ci do fe ga lo mi ra ta vi",
        "dol pril statin mycin zole pam xin fen cort line",
    ),
    "place_name": joined("zor kel mar thi val dra nyr or bel cas", "an eth ia ombe ul is ora ade"),
}

PHRASES = _MADE_UP | entries("""
# around a template
before =  |  |  |  | please | hey assistant | could you | could you please | can you | i want you to | i need you to |
    would you | okay now | hey assistant please | next | kindly | be so kind and | go ahead and | quickly
greeting =  |  |  |  | hey assistant | excuse me | tell me | quick question | sorry but | so | okay | listen
after =  |  |  |  |  | please | now | for me | right now | thanks | thank you | if you can | when you can | will you |
    as usual

# people
first: will may mark rose grace hope summer april june jack bill art drew pat grant chase robin faith joy dawn iris
    lily ruby amber violet anna ben clara david emma felix gina henry ida jonas karim laura milo nadia oscar paula
    quentin rosa samir tara umar vera walter xenia yusuf zoe aisha boris chen dilip elena farah george hana ivan
    jamila kofi lena mateo noor olga pedro ravi sofia tomas ursula viktor wanda yara zeno amina bruno carla diego
    esther fiona gustav heidi imran julia kenji lucia marco nina omar petra rafael selma teresa ugo wei yuki
person = <first> <last>
relation = mom | dad | my sister | my brother | grandma | grandpa | my wife | my husband | my boss | my aunt |
    my uncle | the neighbor | the babysitter | my landlord | my teacher | the office | home | work | my roommate |
    the plumber | my best friend
contact = <first> | <first> | <first> <last> | <first> <last> | <relation> | doctor <last> | <first> from <place>
place = work | school | the gym | the station | the airport | the park | the library | the bakery | the hospital |
    the market | church | the harbor | the cinema | the museum | the lake | the farm | the stadium | the garage |
    the pharmacy | the old mill

# numbers and times
digit: 0 1 2 3 4 5 6 7 8 9
small: one two three four five six seven eight nine ten 2 3 4 5 6 7 8 9 10 12
hour: one two three four five six seven eight nine ten eleven twelve 1 2 3 4 5 6 7 8 9 10 11 12
minute: five ten fifteen twenty thirty forty fifty 05 10 15 20 25 30 35 40 45 50 55
daypart = am | pm | in the morning | in the evening | o'clock | at night |
time = <hour> <daypart> | <hour> <daypart> | <hour> <minute> | <hour> <minute> <daypart> | half past <hour> |
    quarter to <hour> | <minute> past <hour> | noon | midnight | lunch time | sunset
weekday: monday tuesday wednesday thursday friday saturday sunday
month: january february march april may june july august september october november december
ordinal: first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth
    fifteenth sixteenth seventeenth eighteenth nineteenth twentieth last
date = today | tomorrow | tonight | yesterday | <weekday> | next <weekday> | this <weekday> | <month> <ordinal> |
    the <ordinal> of <month> | the <ordinal> | next week | the day after tomorrow | <weekday> morning |
    <weekday> night | christmas eve | the weekend
duration = <small> minutes | <small> hours | <large> seconds | half an hour | <small> days | an hour
frequency = every day | every morning | every night | twice a day | every <small> hours | once a week |
    every <weekday> | after every meal | before bed | <small> times a day | every other day | every <ordinal> day

# communication
app = beam | chatter | pingo | letterbox | carrier pigeon | relay | whistle | courier | hallo | text | email |
    speaker | work phone | video | postcard | signal tower | blue bird | skylark
phone = <digit> <digit> <digit> <digit> <digit> <digit> | <large> <large> <digit> <digit> | <large> <large> <large>
subject = i | we | the kids | mom and i | they | the guests | the team | everybody | my train | the package |
    <first> | <first> and i | our flight | the meeting | dinner | the movie | the car
doing = will be late | is at <place> | can not come to <place> | will be there <date> | must leave at <time> |
    need the keys | forgot the tickets | is ready | found your <thing> | would like to see you |
    want to watch <title> | took the <thing> to <place> | have to call <contact> | need <small> more <thing> |
    may arrive at <time> | will bring the <thing> | is waiting for you | moved to <date> | have a <symptom> |
    lost the <thing> | will mark the date | liked the <thing>
thing: charger umbrella book camera ladder cake laptop salad guitar wallet jacket blanket tent helmet folder suitcase
    invitation present battery tablet bottle map coat receipt passport drill flashlight stroller basket violin
ending =  |  |  | see you <date> | sorry | love you | call me back | thanks | do not wait | at <time> |
    because of the <thing>
message = <subject> <doing> <ending> | <subject> <doing> <ending> | <subject> <doing> | happy birthday <first> |
    where is the <thing> | see you at <place> at <time> | please bring the <thing> | are you free <date> |
    do not forget the <thing> | thank you for the <thing> <first>
group = the <thing> club | <place> friends | <last> family | <first> and <first> | <weekday> team | class of <large>
call = call | ring | phone | dial | give a call to | get me | start a call with | connect me to | try to reach
send: send write text forward deliver shoot
note = a message | a note | a text | an email | a line | a voice message

# health
remedy = <medicine> | <medicine> | <medicine> | <medicine> | <common> | <common> | <medicine> <large> |
    <medicine> plus
common = aspirin | vitamin c | iron | cough syrup | eye drops | insulin | magnesium | fish oil | zinc |
    the blue pill | my inhaler | antibiotics | sleeping pills | nose spray | calcium | folic acid
unit: tablets milligrams drops pills spoons units capsules puffs grams milliliters
dose = <small> <unit> | <small> <unit> | <large> <unit> | <large> milligrams | half a tablet | a spoon | one pill |
    a double dose
measure = blood pressure | weight | temperature | blood sugar | heart rate | pulse | oxygen | cholesterol |
    resting pulse | waist | sleep | body fat | steps | mood
reading = <large> | <large> over <large> | <large> point <digit> | <large> kilos | <small> hours | <large> pounds |
    <large> percent | <large> beats | <small> point <digit> | <large> degrees
part: head throat back knee ear shoulder stomach chest ankle elbow wrist neck hip jaw eye foot hand tooth
ailment = headache | fever | cold | flu | migraine | dry cough | runny nose | dizziness | nausea | rash | cramps |
    heartburn | insomnia | chills | hay fever
strength = mild | bad | terrible | slight | sharp | burning | constant | strange | light | severe |  |
symptom = <strength> <ailment> | <strength> <ailment> | <strength> pain in the <part> | sore <part> | swollen <part> |
    <strength> <part> pain | stiff <part>
doctor = doctor <last> | doctor <last> | doctor <first> <last> | the dentist | the eye doctor | my therapist |
    nurse <first> | the skin specialist | the heart clinic | the <place_name> clinic | the family doctor |
    the <part> specialist
take: take swallow have use
book = book | make | schedule | arrange | set up | get me

# video
adjective: silent golden broken last secret burning frozen hidden lonely scarlet midnight endless crooked electric
    gentle hungry invisible little paper restless savage tiny velvet wild yellow first sharp cold
noun: river garden king queen winter summer mirror dragon harbor letter doctor nurse teacher shadow lion train island
    soldier ocean mountain orchard prince thief window castle circus detective engine forest ghost horizon journey
    kingdom lantern moon night promise rose sparrow star storm tower voyage wolf fever signal message call
title = the <adjective> <noun> | the <adjective> <noun> | <noun> of <place_name> | the <noun> of <noun> |
    return to <place_name> | <first> | <first> and the <noun> | <first> <last> | <adjective> <noun> |
    a <noun> for <first> | <weekday> night <noun> | <large> <noun> street | <hour> past midnight | call me <first> |
    <place_name> <small> | when <first> met <first> | the <noun> at <place> | dear doctor <last> |
    the <ordinal> <noun> | one <noun> too many | good night <place_name>
genre = comedy | drama | horror | science fiction | romance | western | crime | documentary | animation | musical |
    war | family | thriller | fantasy | sports | history | romantic comedy | travel | cooking | true crime |
    detective | hospital
kind: movie film series show documentary video clip episode
kinds: movies films series shows documentaries videos clips
device = the living room tv | the tablet | the bedroom tv | my laptop | the projector | the kitchen screen |
    the big screen | my phone | the kids tablet | the speaker | the tv upstairs | the guest room tv | the car display
service = streamly | cinebox | popcorn | nightowl | family plus | channel four | reelhouse | moonlight | the library |
    channel nine | skylark
play = play | watch | start | put on | stream | show me | show | let me see | i want to watch | run
find = find | search for | look for | look up | list | show me | browse | search
stars = <digit> stars | <small> out of ten | <small> points | a <digit> | <small> stars | thumbs up | thumbs down |
    <digit> out of <digit>
level = <large> percent | <small> | maximum | the lowest level | level <small> | half
watchlist = my watch list | my favorites | the <weekday> list | the kids list | <first> 's list | the <genre> list |
    the party queue | my <month> queue
""")

TEMPLATES = {
    "communication": entries("""
call_contact = <call> {contact} on {app} | <call> {contact} at {place} | <call> {contact} with {app} |
    <call> the number {number:phone} | use {app} and <call> {contact} | <call> {contact} and {contact} together |
    <call> {contact} back | make a call to {contact} | put me through to {contact} at {place} |
    <call> {contact} again on {app}
send_message = <send> {contact} <note> saying {message} | <send> <note> to {contact} that {message} |
    tell {contact} that {message} | <send> {message} to {contact} with {app} | let {contact} know {message} |
    use {app} to tell {contact} {message} | <send> <note> to {group} saying {message} |
    reply to {contact} with {message} | message {contact} on {app} {message} |
    <send> <note> to {number:phone} saying {message} | write {message} in {group}
read_messages = read me the messages from {contact} | what did {contact} write on {date} ? | read my {app} messages |
    show me what {contact} sent {date} | are there new messages from {contact} ? | did {contact} reply on {app} ? |
    read the {position:ordinal} message from {contact} | any news in {group} since {time} ? |
    open the messages of {group} from {date} | what was the last thing {contact} wrote about the <thing> ? |
    play the voice message from {contact}
schedule_call = remind me to <call> {contact} at {time} | schedule a call with {contact} for {date} at {time} |
    plan to call {contact} {date} | i have to <call> {contact} {date} at {time} so remind me . |
    set up a {app} call with {contact} and {contact} {date} | in {duration} remind me to <call> {contact} |
    arrange a call with {group} on {date} | move my call with {contact} to {time} |
    put a call with {contact} in the calendar for {date} | call {contact} at {time} {date}
add_contact = add {contact} to my contacts | save {number:phone} as {contact} |
    store the number {number:phone} under {contact} | add {contact} to {group} |
    create a contact {contact} with number {number:phone} | the new number of {contact} is {number:phone} . |
    put {contact} into {group} on {app} | change the number of {contact} to {number:phone} |
    make a group {group} with {contact} and {contact} | save {contact} with the number {number:phone}
block_contact = block {contact} on {app} | block the number {number:phone} | do not let {contact} call me |
    stop messages from {contact} | mute {group} for {duration} | mute {contact} until {date} |
    silence {contact} until {time} | no more calls from {number:phone} . |
    i do not want to hear from {contact} until {date} . | leave {group} on {app}
"""),
    "health": entries("""
log_medicine = i took {dose} of {medicine:remedy} at {time} . | note that i took {medicine:remedy} {date} |
    log {dose} of {medicine:remedy} | i just had {dose} of {medicine:remedy} . |
    {contact} took {medicine:remedy} at {time} . | write down {dose} {medicine:remedy} for {date} |
    add {medicine:remedy} to my medicine diary | i had my {medicine:remedy} at {time} . |
    mark {medicine:remedy} as taken {date} | record that {contact} had {dose} of {medicine:remedy} {date}
remind_medicine = remind me to <take> {medicine:remedy} at {time} |
    remind me to <take> {dose} of {medicine:remedy} {frequency} |
    tell {contact} to <take> {medicine:remedy} at {time} | set a reminder for {medicine:remedy} {frequency} |
    i have to <take> {medicine:remedy} {frequency} . | wake me at {time} for my {medicine:remedy} |
    from {date} on i <take> {dose} of {medicine:remedy} {frequency} . | in {duration} remind me of {medicine:remedy} |
    do not let me forget {medicine:remedy} {date} | alarm at {time} for {dose} of {medicine:remedy}
log_measurement = my {measure} is {reading} . | log {measure} {reading} for {date} |
    write down a {measure} of {reading} | {measure} was {reading} at {time} . |
    record {reading} as my {measure} {date} | the {measure} of {contact} is {reading} . |
    note {contact} has a {measure} of {reading} | add {reading} to my {measure} diary |
    at {time} my {measure} was {reading} . | set my {measure} goal to {reading}
book_appointment = <book> an appointment with {doctor} {date} | <book> an appointment with {doctor} at {time} {date} |
    i must see {doctor} about {symptom} . | <book> a visit to {doctor} for {contact} |
    when can {doctor} see me {date} ? | cancel my appointment with {doctor} {date} |
    move my visit to {doctor} to {date} at {time} | <book> a call with {doctor} {date} |
    is {doctor} free {date} at {time} ? | <book> a check of my {measure} with {doctor}
report_symptom = i have {symptom} since {date} . | i have a {symptom} what can i do ? |
    {contact} has {symptom} and {symptom} . | what helps against {symptom} ? | since {time} i feel {symptom} . |
    note {symptom} for {date} | can {medicine:remedy} cause {symptom} ? | my {symptom} is worse {date} . |
    the {symptom} of {contact} is gone since {date} . | i had {symptom} for {duration} .
ask_dose = how much {medicine:remedy} can i take ? | how many {medicine:remedy} did i take {date} ? |
    is {dose} of {medicine:remedy} too much ? | can i take {medicine:remedy} with {medicine:remedy} ? |
    what is the dose of {medicine:remedy} for {symptom} ? | when did {contact} take {medicine:remedy} ? |
    may {contact} take {medicine:remedy} {frequency} ? | did i take my {medicine:remedy} {date} ? |
    how often can i take {dose} of {medicine:remedy} ? | will {medicine:remedy} help against {symptom} ?
"""),
    "video": entries("""
play_video = <play> {title} on {device} | <play> the <kind> {title} | <play> {title} from {service} |
    <play> episode {episode:small} of {title} | <play> the {episode:ordinal} episode of {title} on {service} |
    <play> a {genre} <kind> with {actor:person} | <play> {title} with {actor:person} in it |
    <play> some {genre} on {device} | open {service} and <play> {title} |
    <play> season {season:small} of {title} on {device} | continue {title} on {device}
search_video = <find> {genre} <kinds> with {actor:person} | what <kinds> has {actor:person} made ? |
    <find> a <kind> called {title} | is {title} on {service} ? | <find> {genre} <kinds> on {service} |
    who plays in {title} ? | when is {title} on {service} ? | <find> <kinds> like {title} |
    what {genre} <kinds> are new on {service} {date} ? | <find> the <kind> where {actor:person} plays a {role:noun}
rate_video = give {title} {rating:stars} | rate {title} {rating:stars} | i give the <kind> {title} {rating:stars} . |
    {rating:stars} for {title} . | rate the last <kind> {rating:stars} |
    my rating for {title} on {service} is {rating:stars} . | {title} with {actor:person} gets {rating:stars} . |
    change my rating of {title} to {rating:stars} | i liked {title} so give it {rating:stars} . |
    tell {contact} i rate {title} {rating:stars}
control_playback = skip {duration} ahead on {device} | go back {duration} in {title} |
    turn the volume on {device} to {level} | pause {title} on {device} | stop the <kind> at {time} |
    set brightness of {device} to {level} | resume {title} at minute {position:large} |
    turn off {device} in {duration} | mute {device} for {duration} |
    skip to the {episode:ordinal} episode of {title} | stop {title} and go to {service}
add_to_watchlist = add {title} to {watchlist} | put the <kind> {title} on {watchlist} | save {title} for {date} |
    add {title} from {service} to {watchlist} | remind me to watch {title} {date} |
    i want to see {title} with {contact} {date} . | remove {title} from {watchlist} |
    what is on {watchlist} for {date} ? | put all {genre} <kinds> with {actor:person} on {watchlist} |
    keep {title} for {contact}
"""),
}
