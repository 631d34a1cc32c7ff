create index orders_by_customer on orders (customer);
