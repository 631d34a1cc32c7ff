create table orders (id integer primary key, customer text not null, cents integer not null);
