"""Three more domains of generated utterances, with slots that are harder to tell apart: nothing but data.

The entries are those of grammar.py, and may use its names. What a slot holds says less about its
type here: songs, albums, artists and playlists are made of the same words, titles hold "by", "to"
and "from", a city is where a journey begins or ends, "for" comes before a person, a price and a day.
The words that decide stand elsewhere, some of them behind the slot, and are misheard now and then.
People correct themselves, and only what they mean is a slot. As in real corpora, some utterances are
ambiguous for everybody: "play the golden wolves" may ask for a song, an album or a band.
"""

from __future__ import annotations

from tasks.nlu.grammar import entries, joined

_SHORT_WORDS = {  # and what a recognizer makes of them now and then; the empty word is one that was missed
    "to": ["two", "too", ""],
    "from": ["form", "front", ""],
    "by": ["buy", "bye", ""],
    "for": ["four", "far", ""],
    "on": ["an", "own", ""],
    "in": ["and", "an", ""],
    "at": ["add", "that", ""],
    "and": ["an", "in", ""],
}
_HEARD = {word: [word] * 13 + others for word, others in _SHORT_WORDS.items()}
_MADE_UP = {
    "maker": joined("ambra belo corvi delta ever fenna gala lumo nova orbi", "bay co dent fix line mark ra tex"),
}

PHRASES = (
    _HEARD
    | _MADE_UP
    | entries("""
correction = no sorry | no wait | i mean | or rather | sorry i meant | uh make that

# music
mood: blue lonely golden slow electric broken wild quiet little crooked last happy heavy neon paper sweet lost distant
nouns: rivers wolves kings mirrors strangers ghosts sparrows dragons letters thieves engines shadows lions islands
    storms neighbors doctors brothers sisters mondays lanterns promises
refrain = stand by <first> | letter to <first> | by the <noun> | from <city> with love | back to <city> | add it up |
    call me <first> | <small> miles to <city> | <weekday> in <city> | waiting for <weekday> | one more <noun> |
    <first> and the <noun> | play it <mood> | next to you | the <noun> and the <noun> | for <first> | tonight |
    <month> rain | to the <noun> and back | songs from <city> | a list of <nouns> | <mood> <nouns> | <mood> <noun> |
    the <mood> <nouns> | the <noun> | <noun> by <noun> | i want <small> <nouns> | <first> | not on <weekday>
band = <first> <last> | <first> <last> | <first> <last> | <first> and the <nouns> | the <nouns> |
    the <mood> <nouns> | <mood> <nouns> | <last> brothers | dj <first> | <first> | <nouns> of <city> | the <last> trio
collection = <weekday> run | <mood> <nouns> | songs for <first> | <first> 's party | <mood> <style> |
    back to <city> | <style> for <first> | cooking with <first> | by the <noun> | <city> road trip |
    <mood> <weekday> | dinner for <small> | <month> mix
style = jazz | folk | soul | techno | country | blues | hip hop | punk | salsa | opera | indie rock | reggae | swing |
    heavy metal | gospel | lounge
channel = radio <city> | <city> one | <style> radio | the <noun> hour | <noun> fm | <large> fm | the <mood> channel
player = the kitchen speaker | my headphones | the car stereo | the bathroom radio | the living room speakers |
    my watch | the old radio | the garage speaker | the speaker upstairs | my phone
source = streamly | tunebox | skylark | wavehouse | popcorn | cloudsong | nightowl | melodia
year = nineteen eighty | the eighties | nineteen <large> | two thousand <small> | the nineties | the sixties |
    last year | nineteen seventy <small>
score = <digit> stars | <small> points | <small> out of ten | thumbs up | thumbs down | <small> stars
listen = play | put on | i want to hear | start | let me hear | i feel like
single: song track tune single
record: album record lp

# travel
city = <place_name> | <place_name> | new <place_name> | port <last> | san <first> | <last> city | rome | oslo | lima |
    paris | cairo | lisbon | nairobi | austin | victoria | florence | boston | santiago | geneva | jackson | denver |
    milan | <last> upon <last> | <place_name> beach | north <place_name> | santa <first> | windsor
airline = <maker> air | air <place_name> | <place_name> airlines | <place_name> express | northern rail |
    the night train | <last> coaches | <city> ferries | blue bird lines
inn = hotel <last> | the <place_name> inn | the <mood> <noun> inn | <first> 's guest house | the <city> grand |
    villa <first> | hotel <mood> <noun> | <maker> suites | <weekday> inn | the <city> palace
party = <small> people | the two of us | my whole family | me and <first> | one adult and <small> kids | just me |
    <small> adults | a group of <small> | <first> and i
cabin = first class | business class | economy | second class | the quiet car | a sleeper | premium economy |
    the cheapest class
stay = <small> nights | one night | a week | two weeks | <small> days and nights
moment = <hour> <daypart> | <hour> <minute> | noon | midnight | half past <hour> | quarter to <hour> | sunset |
    sunrise | <hour> o'clock
day = today | tomorrow | <weekday> | next <weekday> | <month> <ordinal> | the <ordinal> | the <ordinal> of <month> |
    tonight | <weekday> morning | christmas eve | next week
reserve = book | get me | i need | find me | reserve | arrange
ride = a flight | a train | a bus | a ticket | a seat | tickets | a ferry | a trip

# shopping
food = rice | milk | olive oil | black bean soup | bread | almond milk | green tea | apples | brown sugar |
    orange juice | cat food | salt | butter | coffee | white wine | sparkling water | corn flakes | honey | eggs |
    peanut butter | red onions | dark chocolate | yogurt | tomato sauce | baby carrots | sweet potatoes
ware = running shoes | a reading lamp | batteries | a phone charger | an umbrella | paper towels | a winter coat |
    a coffee machine | a guitar | headphones | a black dress | a tent | gift paper | a bread knife | a travel pillow |
    a mirror | garden gloves | a music box | a train set | blue jeans | a letter opener | a city map | pencils |
    a card game | an orange lamp | a road bike | dish soap
goods = <food> | <ware>
amount = <small> | <small> | a dozen | half a dozen | a few | a couple of | twenty | some more
package: bags bottles boxes cans packs jars bunches cartons pounds kilos slices rolls pairs crates
brand = <maker> | <maker> | <maker> | <maker> <noun> | green <noun>
store = <last> 's | the <place_name> market | the bakery | <last> mart | <first> 's corner | the pharmacy |
    the <last> store | the shop in <city> | <city> books | the farm
basket = my shopping list | the <weekday> list | the party list | <first> 's list | my <city> list |
    the camping list | the grocery list | the office list | the birthday list
cost = <large> dollars | <small> dollars | twenty bucks | <large> euros | ten dollars | <small> euros |
    <small> <large> | half the price
shade = red | blue | dark green | black | white | light gray | orange | brown | silver | gold | pink | violet |
    amber | olive | cream | wine red
friend = <first> | <relation> | <first> <last> | the kids | aunt <first> | the <last> family
buy = order | buy | get me | pick up
""")
)

TEMPLATES = {
    "music": entries("""
play_music = <listen> {song:refrain} | <listen> {album:refrain} | <listen> {song:refrain} <by> {artist:band} |
    <listen> {artist:band} <on> {device:player} | <listen> {song:refrain} <on> {device:player} |
    <listen> the <record> {album:refrain} | <listen> {album:refrain} <by> {artist:band} the whole <record> |
    <listen> {album:refrain} <from> start <to> end | <listen> the <single> {song:refrain} <from> {service:source} |
    <listen> some {genre:style} <from> {year} | <listen> something <by> {artist:band} <from> {year} |
    <listen> {playlist:collection} my playlist <on> {device:player} | <listen> my {playlist:collection} playlist |
    <listen> {station:channel} <on> {device:player} | tune {device:player} <to> {station:channel} |
    <listen> {genre:style} <on> {service:source} | <listen> {artist:band} live |
    <listen> the last <record> of {artist:band} <on> {service:source} |
    use {service:source} <to> play {song:refrain} |
    <listen> {song:refrain} <and> then {song:refrain}
add_to_playlist = add {song:refrain} <to> {playlist:collection} | add {album:refrain} <to> {playlist:collection} |
    add {artist:band} <to> my {playlist:collection} playlist |
    put {song:refrain} <by> {artist:band} <on> {playlist:collection} | add {artist:band} <to> {playlist:collection} |
    add the <record> {album:refrain} <to> {playlist:collection} | put this <single> <on> {playlist:collection} |
    put {song:refrain} <and> {song:refrain} <on> {playlist:collection} |
    i want {song:refrain} <in> my playlist {playlist:collection} | add more {genre:style} <to> {playlist:collection} |
    {playlist:collection} needs {song:refrain} <by> {artist:band} . | take {song:refrain} off {playlist:collection} |
    make a playlist {playlist:collection} with {artist:band} <and> {artist:band} |
    add {album:refrain} the <record> <by> {artist:band} <to> {playlist:collection}
rate_music = give {song:refrain} {rating:score} | give {album:refrain} {rating:score} |
    rate the <record> {album:refrain} {rating:score} |
    {rating:score} <for> {song:refrain} <by> {artist:band} . |
    {album:refrain} is an <record> that gets {rating:score} . |
    i give {artist:band} {rating:score} . | rate {song:refrain} {rating:score} <on> {service:source} |
    {song:refrain} deserves {rating:score} . | rate this <single> {rating:score} |
    my rating <for> {station:channel} the station is {rating:score} . |
    give the playlist {playlist:collection} {rating:score}
ask_music = who sings {song:refrain} ? | when did {artist:band} record {album:refrain} ? |
    what is this <single> called ? | is {artist:band} <on> {service:source} ? |
    is {song:refrain} <on> {service:source} ? |
    which <record> has {song:refrain} <on> it ? | what {genre:style} did {artist:band} make <in> {year} ? |
    is {song:refrain} <on> {playlist:collection} ? | what was playing <on> {station:channel} ? |
    did {artist:band} write {song:refrain} ? | how many songs are <on> {playlist:collection} ? |
    look <for> the <single> {song:refrain} <from> {year} | find out who made the <record> {album:refrain}
"""),
    "travel": entries("""
book_trip = <reserve> <ride> <from> {origin:city} <to> {destination:city} |
    <reserve> <ride> <to> {destination:city} <from> {origin:city} |
    <reserve> <ride> <to> {destination:city} {date:day} back {return_date:day} |
    <reserve> <ride> <for> {travellers:party} <to> {destination:city} <on> {carrier:airline} |
    i am <in> {origin:city} <and> must be <in> {destination:city} <by> {arrive_time:moment} . |
    <reserve> <ride> out of {origin:city} <at> {depart_time:moment} {date:day} |
    <reserve> {class:cabin} <from> {origin:city} <to> {destination:city} {date:day} <for> {travellers:party} |
    <reserve> <ride> <to> {destination:city} through {stopover:city} <in> {class:cabin} |
    {origin:city} <to> {destination:city} {date:day} <and> home {return_date:day} . |
    <reserve> <ride> that gets <to> {destination:city} <at> {arrive_time:moment} |
    {destination:city} <from> {origin:city} via {stopover:city} with {carrier:airline} . |
    <reserve> <ride> <to> <city> <correction> {destination:city} {date:day} |
    <reserve> <ride> <from> <city> <correction> {origin:city} <to> {destination:city} |
    <reserve> {class:cabin} with {carrier:airline} leaving {origin:city} {date:day} <at> {depart_time:moment} |
    take {travellers:party} <to> {destination:city} {date:day} with a stop <in> {stopover:city}
book_hotel = <reserve> a room <at> {hotel:inn} <for> {nights:stay} |
    <reserve> {hotel:inn} <in> {destination:city} {date:day} |
    <reserve> a room <in> {destination:city} <for> {travellers:party} |
    <reserve> {nights:stay} <at> {hotel:inn} <for> {travellers:party} |
    <reserve> a bed <in> {destination:city} <for> {date:day} |
    <reserve> {hotel:inn} <for> {travellers:party} {date:day} |
    we stay <in> {destination:city} <for> {nights:stay} <at> {hotel:inn} . |
    is {hotel:inn} free <for> {nights:stay} ? |
    <reserve> {hotel:inn} <from> {date:day} until {return_date:day} |
    <reserve> a room <for> {travellers:party} <at> <inn> <correction> {hotel:inn} |
    <reserve> a double room <at> {hotel:inn} until {return_date:day}
ask_trip = when does the {carrier:airline} <from> {origin:city} get <in> ? | is {carrier:airline} late {date:day} ? |
    how do i get <from> {origin:city} <to> {destination:city} ? |
    what does {class:cabin} <to> {destination:city} cost ? |
    when is the last <ride> <to> {destination:city} {date:day} ? |
    does {carrier:airline} go <to> {destination:city} ? |
    does the {depart_time:moment} <to> {destination:city} stop <in> {stopover:city} ? |
    how long does it take <from> {origin:city} <to> {destination:city} ? |
    what is <in> {destination:city} before {arrive_time:moment} ? |
    can i be <in> {destination:city} <by> {arrive_time:moment} if i leave <at> {depart_time:moment} ? |
    is there <ride> <from> {origin:city} after {depart_time:moment} ?
change_trip = move my flight <to> {destination:city} <to> {date:day} | cancel {hotel:inn} <in> {destination:city} |
    change the way back <to> {return_date:day} | change my seat <to> {class:cabin} instead of <cabin> |
    change <to> the {depart_time:moment} <to> {destination:city} |
    change my stay <at> {hotel:inn} <to> {nights:stay} |
    change {carrier:airline} <to> the {depart_time:moment} | i want <to> leave {date:day} not <day> . |
    we come back {return_date:day} instead of <day> . | go through {stopover:city} instead of <city> |
    start <from> {origin:city} instead of <city> {date:day} | cancel the trip <from> {origin:city} {date:day}
"""),
    "shopping": entries("""
add_to_list = add {item:goods} <to> {list:basket} |
    put {quantity:amount} {package} of {item:food} <on> {list:basket} |
    add {quantity:amount} {package} of {item:food} <and> {item:goods} <to> {list:basket} |
    put {brand} {item:food} <on> {list:basket} | put {item:goods} <from> {store} <on> {list:basket} |
    write {item:goods} {item:food} <and> {item:food} <on> {list:basket} | take {item:goods} off {list:basket} |
    add {color:shade} {item:goods} <for> {recipient:friend} <to> {list:basket} |
    add <goods> <correction> {item:goods} <to> {list:basket} | {list:basket} needs {item:goods} . |
    put {item:goods} <for> {recipient:friend} <on> {list:basket}
order_item = <buy> {item:goods} <from> {store} | <buy> {quantity:amount} {package} of {item:food} <from> {store} |
    <buy> {item:goods} <for> {recipient:friend} | <buy> {item:goods} <for> {date:day} |
    <buy> {brand} {item:goods} <for> {price:cost} | <buy> {item:goods} <in> {color:shade} <for> {date:day} |
    <buy> {item:goods} <by> {brand} <in> {color:shade} | <buy> {item:goods} <and> {item:goods} <from> {store} |
    <buy> {quantity:amount} {package} of {brand} {item:food} |
    <buy> <goods> <correction> {item:goods} <from> {store} |
    <buy> {item:goods} <in> <shade> <correction> {color:shade} | <buy> {item:goods} <for> {price:cost} <from> {store}
find_item = where can i get {item:goods} <for> {price:cost} ? | how much is {item:goods} <at> {store} ? |
    does {store} have {brand} ? | who sells {item:goods} <by> {brand} under {price:cost} ? |
    is there {color:shade} {item:goods} <at> {store} ? | what does {brand} cost <at> {store} ? |
    compare {brand} <and> {brand} {item:goods} | where do they have {item:goods} <in> {color:shade} ? |
    who sells {quantity:amount} {package} of {item:food} <for> {price:cost} ? |
    compare {item:goods} <and> {item:goods}
track_order = where is my {item:goods} <from> {store} ? | will my {item:goods} be here {date:day} ? |
    move my order <from> {store} <to> {date:day} | cancel my {item:goods} <from> {brand} |
    send back {item:goods} <to> {store} | did {recipient:friend} get my {item:goods} ? |
    when does {store} bring my {item:goods} ? | deliver my {item:goods} <to> {recipient:friend} instead |
    change my order <to> {quantity:amount} {package} of {item:food} | change my {item:goods} <to> {color:shade} |
    has {store} sent my {brand} {item:goods} ? | i want {price:cost} back <for> my {item:goods}
"""),
}
