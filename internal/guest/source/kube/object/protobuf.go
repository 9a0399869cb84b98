// SPDX-License-Identifier: Apache-2.0

package object

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/port"
)

// field is a field of a message.
type field struct {
	number protowire.Number
	kind   protowire.Type
	bytes  []byte // if kind is protowire.BytesType
	varint uint64 // if kind is protowire.VarintType
}

// decode calls read with each field of a message.
func decode(b []byte, read func(f field) error) error {
	for len(b) > 0 {
		var f field
		var n int
		f.number, f.kind, n = protowire.ConsumeTag(b)
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		switch f.kind {
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(b)
		case protowire.VarintType:
			f.varint, n = protowire.ConsumeVarint(b)
		default:
			n = protowire.ConsumeFieldValue(f.number, f.kind, b)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		b = b[n:]
		if err := read(f); err != nil {
			return fmt.Errorf("field %d: %w", f.number, err)
		}
	}
	return nil
}

var errKind = errors.New("not of the expected type")

// message decodes a field that is a message.
func (f field) message(read func(f field) error) error {
	if f.kind != protowire.BytesType {
		return errKind
	}
	return decode(f.bytes, read)
}

func (f field) text(to *string) error {
	if f.kind != protowire.BytesType {
		return errKind
	}
	*to = string(f.bytes)
	return nil
}

// add appends a text.
func (f field) add(to *[]string) error {
	var s string
	err := f.text(&s)
	*to = append(*to, s)
	return err
}

func (f field) number32(to *int32) error {
	if f.kind != protowire.VarintType {
		return errKind
	}
	*to = int32(f.varint)
	return nil
}

func (f field) flag(to **bool) error {
	if f.kind != protowire.VarintType {
		return errKind
	}
	b := f.varint != 0
	*to = &b
	return nil
}

// optional sets a pointer to a new value.
func optional[T any](to **T, set func(*T) error) error {
	*to = new(T)
	return set(*to)
}

// next appends an element to a list and returns it.
func next[T any](list *[]T) *T {
	*list = append(*list, *new(T))
	return &(*list)[len(*list)-1]
}

// Reset implements what a decoder of protobuf needs.
func (o *Service) Reset() { *o = Service{} }

// Reset implements what a decoder of protobuf needs.
func (o *ServiceList) Reset() { *o = ServiceList{} }

// Reset implements what a decoder of protobuf needs.
func (o *EndpointSlice) Reset() { *o = EndpointSlice{} }

// Reset implements what a decoder of protobuf needs.
func (o *EndpointSliceList) Reset() { *o = EndpointSliceList{} }

// Unmarshal decodes a message of protobuf.
func (o *ServiceList) Unmarshal(b []byte) error {
	return decode(b, func(f field) error {
		switch f.number {
		case 1:
			return f.message(listMeta(&o.ListMeta))
		case 2:
			return f.message(next(&o.Items).read)
		}
		return nil
	})
}

// Unmarshal decodes a message of protobuf.
func (o *EndpointSliceList) Unmarshal(b []byte) error {
	return decode(b, func(f field) error {
		switch f.number {
		case 1:
			return f.message(listMeta(&o.ListMeta))
		case 2:
			return f.message(next(&o.Items).read)
		}
		return nil
	})
}

func listMeta(m *metav1.ListMeta) func(field) error {
	return func(f field) error {
		switch f.number {
		case 2:
			return f.text(&m.ResourceVersion)
		case 3:
			return f.text(&m.Continue)
		}
		return nil
	}
}

func objectMeta(m *metav1.ObjectMeta) func(field) error {
	return func(f field) error {
		switch f.number {
		case 1:
			return f.text(&m.Name)
		case 3:
			return f.text(&m.Namespace)
		case 6:
			return f.text(&m.ResourceVersion)
		case 11:
			if m.Labels == nil {
				m.Labels = make(map[string]string)
			}
			return label(f, m.Labels)
		case 12:
			one := make(map[string]string, 1)
			err := label(f, one)
			for k, v := range one {
				if !strings.HasPrefix(k, port.LabelPrefix) {
					continue // the others can be large
				}
				if m.Annotations == nil {
					m.Annotations = make(map[string]string)
				}
				m.Annotations[k] = v
			}
			return err
		}
		return nil
	}
}

// label adds an entry of a map.
func label(f field, to map[string]string) error {
	var key, value string
	err := f.message(func(f field) error {
		switch f.number {
		case 1:
			return f.text(&key)
		case 2:
			return f.text(&value)
		}
		return nil
	})
	to[key] = value
	return err
}

// Unmarshal decodes a message of protobuf.
func (o *Service) Unmarshal(b []byte) error { return decode(b, o.read) }

func (o *Service) read(f field) error {
	switch f.number {
	case 1:
		return f.message(objectMeta(&o.ObjectMeta))
	case 2:
		return f.message(o.Spec.read)
	case 3:
		return f.message(o.Status.read)
	}
	return nil
}

func (s *ServiceSpec) read(f field) error {
	switch f.number {
	case 1:
		return f.message(next(&s.Ports).read)
	case 3:
		return f.text(&s.ClusterIP)
	case 4:
		return f.text(&s.Type)
	case 5:
		return f.add(&s.ExternalIPs)
	case 9:
		return f.add(&s.LoadBalancerSourceRanges)
	case 18:
		return f.add(&s.ClusterIPs)
	case 19:
		return f.add(&s.IPFamilies)
	}
	return nil
}

func (p *ServicePort) read(f field) error {
	switch f.number {
	case 1:
		return f.text(&p.Name)
	case 2:
		return f.text(&p.Protocol)
	case 3:
		return f.number32(&p.Port)
	case 5:
		return f.number32(&p.NodePort)
	}
	return nil
}

func (s *ServiceStatus) read(f field) error {
	if f.number != 1 {
		return nil
	}
	return f.message(func(f field) error { // the load balancer
		if f.number != 1 {
			return nil
		}
		in := next(&s.LoadBalancer.Ingress)
		return f.message(func(f field) error {
			if f.number != 1 {
				return nil
			}
			return f.text(&in.IP)
		})
	})
}

// Unmarshal decodes a message of protobuf.
func (o *EndpointSlice) Unmarshal(b []byte) error { return decode(b, o.read) }

func (o *EndpointSlice) read(f field) error {
	switch f.number {
	case 1:
		return f.message(objectMeta(&o.ObjectMeta))
	case 2:
		return f.message(next(&o.Endpoints).read)
	case 3:
		return f.message(next(&o.Ports).read)
	case 4:
		return f.text(&o.AddressType)
	}
	return nil
}

func (e *Endpoint) read(f field) error {
	switch f.number {
	case 1:
		return f.add(&e.Addresses)
	case 2:
		return f.message(e.Conditions.read)
	case 4:
		if e.TargetRef == nil {
			e.TargetRef = new(Reference)
		}
		return f.message(e.TargetRef.read)
	}
	return nil
}

func (c *Conditions) read(f field) error {
	switch f.number {
	case 1:
		return f.flag(&c.Ready)
	case 2:
		return f.flag(&c.Serving)
	}
	return nil
}

func (r *Reference) read(f field) error {
	switch f.number {
	case 1:
		return f.text(&r.Kind)
	case 2:
		return f.text(&r.Namespace)
	case 3:
		return f.text(&r.Name)
	}
	return nil
}

func (p *EndpointPort) read(f field) error {
	switch f.number {
	case 1:
		return optional(&p.Name, f.text)
	case 2:
		return optional(&p.Protocol, f.text)
	case 3:
		return optional(&p.Port, f.number32)
	}
	return nil
}
